"""The blob-tier contract in fair weather: the way there and back, forgetting, what a tier knows of itself, bounds."""

from __future__ import annotations

import random

import pytest

from tierkv.frame import HEADER_BYTES, pack
from tierkv.ids import EVERYTHING, BlockKey, KeyPrefix
from tierkv.testing.blob_tools import BlobTierSubject
from tierkv.testing.payloads import (
    Destination,
    aligned,
    header_of,
    key_of,
    make_item,
    namespace_of,
    pages,
    tenant_of,
)
from tierkv.tier import BlobTier, Outcome, Presence
from tierkv.units import ALIGN_BYTES, GIB, KIB, MIB

SIZES = (0, 1, 511, 512, 4095, 4096, 4097, 64 * KIB, MIB, MIB + 1)


class BlobTierBasics(BlobTierSubject):
    """Nothing fails here."""

    # ---- the way there and back

    @pytest.mark.parametrize("length_bytes", SIZES)
    def test_round_trip(self, tier: BlobTier, length_bytes: int) -> None:
        key = key_of(length_bytes)
        item = make_item(key, length_bytes)
        before = bytes(item.header), bytes(item.payload)
        [outcome] = self.put(tier, [item])
        assert (bytes(item.header), bytes(item.payload)) == before, "put_from changed the caller's buffers"
        if length_bytes + ALIGN_BYTES > tier.caps.max_block_bytes:
            assert outcome is Outcome.FULL
            return
        assert outcome is Outcome.DONE
        place = Destination(key, length_bytes)
        assert self.get(tier, [place]) == [Outcome.DONE]
        place.check(length_bytes)
        assert place.want.header[:HEADER_BYTES] == item.header[:HEADER_BYTES], "the header came back changed"

    def test_round_trip_into_a_larger_buffer(self, tier: BlobTier) -> None:
        key = key_of(1)
        self.put_blocks(tier, [key], 5000)
        place = Destination(key, 64 * KIB)
        assert self.get(tier, [place]) == [Outcome.DONE]
        place.check(5000)

    def test_batch_of_mixed_sizes_and_misses(self, tier: BlobTier) -> None:
        sizes = [length for length in SIZES if length + ALIGN_BYTES <= tier.caps.max_block_bytes]
        items = [make_item(key_of(i), length) for i, length in enumerate(sizes)]
        assert set(self.put(tier, items)) == {Outcome.DONE}
        places = []
        for i, length in enumerate(sizes):
            places += [Destination(key_of(i), length), Destination(key_of(1000 + i), length)]
        outcomes = self.get(tier, places)
        assert outcomes == [Outcome.DONE, Outcome.MISS] * len(sizes)
        for place, length in zip(places[::2], sizes, strict=True):
            place.check(length)

    def test_batch_in_another_order_and_with_a_repeated_key(self, tier: BlobTier) -> None:
        keys = [key_of(i) for i in range(24)]
        self.put_blocks(tier, keys)
        wanted = [*reversed(keys), keys[3], keys[3]]
        places = [Destination(key, 4097) for key in wanted]
        assert set(self.get(tier, places)) == {Outcome.DONE}
        for place in places:
            place.check(4097)

    def test_empty_batches(self, tier: BlobTier) -> None:
        assert self.put(tier, []) == []
        assert self.get(tier, []) == []
        assert tier.probe([], self.deadline()) == []
        tier.delete([])

    def test_unknown_key_is_a_miss(self, tier: BlobTier) -> None:
        self.put_blocks(tier, [key_of(1)])
        place = Destination(key_of(2), 4097)
        assert self.get(tier, [place]) == [Outcome.MISS]
        assert tier.probe([key_of(2)], self.deadline()) == [Presence.ABSENT]

    def test_padding_means_nothing(self, tier: BlobTier) -> None:
        item = make_item(key_of(1), 5000)
        other = make_item(key_of(1), 5000)
        item.payload[5000:] = bytes(len(item.payload) - 5000)
        item.header[HEADER_BYTES:] = bytes(ALIGN_BYTES - HEADER_BYTES)
        for each in (item, other):
            assert self.put(tier, [each]) == [Outcome.DONE]
            self.must_find(tier, [key_of(1)], 5000)

    def test_put_twice_leaves_one_whole_block(self, tier: BlobTier) -> None:
        key = key_of(1)
        for epoch in (1, 2, 2):
            assert self.put(tier, [make_item(key, 9000, epoch=epoch)]) == [Outcome.DONE]
            self.must_find(tier, [key], 9000)
        assert self.put(tier, [make_item(key, 9000), make_item(key, 9000)]) == [Outcome.DONE] * 2
        self.must_find(tier, [key], 9000)
        if not tier.caps.evicts_itself:
            assert tier.usage().blocks == 1
        tier.delete([key])
        self.must_miss(tier, [key])

    def test_a_ttl_in_the_future_hides_nothing(self, tier: BlobTier) -> None:
        assert self.put(tier, [make_item(key_of(1), 4097, ttl_s=3600.0)]) == [Outcome.DONE]
        self.must_find(tier, [key_of(1)])

    # ---- forgetting

    def test_delete(self, tier: BlobTier) -> None:
        keys = [key_of(i) for i in range(6)]
        self.put_blocks(tier, keys)
        tier.delete([keys[0], key_of(99), keys[4], keys[4]])
        self.must_miss(tier, [keys[0], keys[4]])
        self.must_find(tier, [keys[1], keys[2], keys[3], keys[5]])
        self.put_blocks(tier, [keys[0]])
        self.must_find(tier, [keys[0]])

    def _put_three_namespaces(self, tier: BlobTier) -> dict[tuple[int, int], list[BlockKey]]:
        stored = {
            (tenant, namespace): [key_of(i, tenant=tenant, namespace=namespace) for i in range(5)]
            for tenant, namespace in ((1, 1), (1, 2), (2, 1))
        }
        for keys in stored.values():
            self.put_blocks(tier, keys)
        return stored

    @pytest.mark.parametrize(
        ("prefix", "cleared"),
        [
            (EVERYTHING, [(1, 1), (1, 2), (2, 1)]),
            (tenant_of(1), [(1, 1), (1, 2)]),
            (namespace_of(1, 2), [(1, 2)]),
            (namespace_of(2, 1), [(2, 1)]),
            (tenant_of(3), []),
        ],
        ids=["everything", "tenant", "namespace", "other_tenants_namespace", "unknown"],
    )
    def test_d27_clear_takes_the_prefix_and_nothing_else(
        self, tier: BlobTier, prefix: KeyPrefix, cleared: list[tuple[int, int]]
    ) -> None:
        stored = self._put_three_namespaces(tier)
        result = tier.clear(prefix, self.deadline())
        assert (result.removed, result.complete) == (5 * len(cleared), True)
        for place, keys in stored.items():
            (self.must_miss if place in cleared else self.must_find)(tier, keys)
        again = tier.clear(prefix, self.deadline())
        assert (again.removed, again.complete) == (0, True)
        self.put_blocks(tier, stored[1, 1])
        self.must_find(tier, stored[1, 1])

    @pytest.mark.parametrize("kind", ["expired", "cancelled"])
    def test_d27_clear_without_time_does_not_claim_success(self, tier: BlobTier, kind: str) -> None:
        stored = self._put_three_namespaces(tier)
        if tier.clear(EVERYTHING, self.no_time(kind)).complete:
            for keys in stored.values():
                self.must_miss(tier, keys)

    # ---- what a tier knows of itself

    def test_probe_answers_in_order(self, tier: BlobTier) -> None:
        keys = [key_of(i) for i in range(200)]
        self.put_blocks(tier, keys[::3], 100)
        random.Random(1).shuffle(keys)
        stored = {key_of(i) for i in range(0, 200, 3)}
        wanted = [Presence.PRESENT if key in stored else Presence.ABSENT for key in keys]
        assert tier.probe(keys, self.deadline()) == wanted

    def test_caps_name_and_status(self, tier: BlobTier) -> None:
        assert tier.name
        assert tier.caps.workers >= 1
        assert tier.caps.max_block_bytes > 0
        _check_plain(tier.status())

    def test_usage_follows_the_blocks(self, tier: BlobTier) -> None:
        readings = [tier.usage()]
        for i in range(8):
            self.put_blocks(tier, [key_of(i)], 64 * KIB)
            readings.append(tier.usage())
        for usage in readings:
            assert 0 <= usage.used_bytes <= usage.capacity_bytes
            assert 0 <= usage.largest_free_bytes <= usage.capacity_bytes
            assert usage.writable
        if tier.caps.evicts_itself:
            return
        assert [usage.blocks for usage in readings] == list(range(9))
        used = [usage.used_bytes for usage in readings]
        assert used == sorted(used)
        assert used[-1] >= 8 * 64 * KIB
        tier.clear(EVERYTHING, self.deadline())
        assert tier.usage().blocks == 0
        assert tier.usage().used_bytes <= used[0] + 64 * KIB, "a cleared tier still counts its blocks"

    def test_largest_free_finds_room(self, tier: BlobTier) -> None:
        usage = tier.usage()
        length_bytes = min(usage.largest_free_bytes, tier.caps.max_block_bytes - ALIGN_BYTES, 8 * MIB)
        self.put_blocks(tier, [key_of(1)], length_bytes)
        self.must_find(tier, [key_of(1)], length_bytes)

    # ---- bounds

    def test_d16_oversize_is_refused_and_harms_nothing(self, tier: BlobTier) -> None:
        self.put_blocks(tier, [key_of(1)])
        length_bytes = tier.caps.max_block_bytes + 1
        if length_bytes > 8 * GIB:
            pytest.skip("no machine holds a block that this tier would refuse")
        # Untouched anonymous memory costs nothing as long as nobody reads it.
        item = make_item(key_of(2), 0)
        item.payload, item.stored_bytes = aligned(pages(length_bytes)), length_bytes
        header = header_of(key_of(2), b"", stored_bytes=length_bytes, decoded_bytes=length_bytes)
        item.header[:HEADER_BYTES] = pack(header)
        small = make_item(key_of(3), 4097)
        assert self.put(tier, [item, small]) == [Outcome.FULL, Outcome.DONE]
        self.must_miss(tier, [key_of(2)])
        self.must_find(tier, [key_of(1), key_of(3)])

    def test_a_block_larger_than_the_buffer_is_corrupt(self, tier: BlobTier) -> None:
        self.put_blocks(tier, [key_of(1)], 64 * KIB)
        place = Destination(key_of(1), ALIGN_BYTES)
        assert self.get(tier, [place]) == [Outcome.CORRUPT]
        place.check_guards()
        self.put_blocks(tier, [key_of(2)])
        self.must_find(tier, [key_of(2)])

    def test_d22_capacity_is_kept(self, tier: BlobTier) -> None:
        capacity_bytes = tier.usage().capacity_bytes
        if capacity_bytes > self.fill_limit_bytes:
            pytest.skip(f"a capacity of {capacity_bytes} bytes is too much to fill")
        length_bytes = min(MIB, tier.caps.max_block_bytes // 2) - ALIGN_BYTES
        outcomes: dict[BlockKey, Outcome] = {}
        for i in range(capacity_bytes // length_bytes + 2):
            [outcomes[key_of(i)]] = self.put(tier, [make_item(key_of(i), length_bytes)])
            assert tier.usage().used_bytes <= capacity_bytes
        assert set(outcomes.values()) <= {Outcome.DONE, Outcome.FULL}
        if tier.caps.evicts_itself:
            return
        stored = [key for key, outcome in outcomes.items() if outcome is Outcome.DONE]
        assert len(stored) < len(outcomes), "more was taken than the capacity"
        assert stored, "nothing was taken"
        self.must_find(tier, stored, length_bytes)
        tier.delete(stored[:1])
        self.put_blocks(tier, [key_of(10**6)], length_bytes)
        self.must_find(tier, [key_of(10**6), *stored[1:]], length_bytes)


def _check_plain(value: object) -> None:
    """Asserts that ``value`` can be shown and sent as it is."""
    match value:
        case None | bool() | int() | float() | str():
            return
        case dict():
            assert all(isinstance(name, str) for name in value), f"names of {value!r} are not all strings"
            for inner in value.values():
                _check_plain(inner)
        case list() | tuple():
            for inner in value:
                _check_plain(inner)
        case _:
            raise AssertionError(f"{value!r} is no plain value")
