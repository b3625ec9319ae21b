"""The blob-tier contract in foul weather: no time, damaged bytes, many threads, late hands on buffers, restarts."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tierkv.clock import Deadline
from tierkv.frame import HEADER_BYTES
from tierkv.ids import EVERYTHING, BlockKey
from tierkv.testing.blob_tools import BlobTierSubject, Report
from tierkv.testing.payloads import Destination, key_of, make_item, payload_of, poison, tenant_of
from tierkv.testing.threads import returns, run_together
from tierkv.tier import BlobTier, Item, Outcome, Presence
from tierkv.units import KIB, MIB

NO_TIME = ("expired", "cancelled", "cancelled_midway")
CUTS = (0, 1, 31, 32, 33, 511, 512, 513, 4095, 4096, 4097)


class BlobTierHardships(BlobTierSubject):
    """A tier may miss, refuse or give up, but never lie, hang or keep a buffer."""

    # ---- no time

    def _in_a_hurry(self, kind: str) -> tuple[Deadline, Report]:
        """A deadline without time, or one that is cancelled when the first block of the batch is done."""
        if kind == "cancelled_midway":
            deadline = self.deadline()
            return deadline, Report(then=deadline.cancel)
        return self.no_time(kind), Report()

    @pytest.mark.parametrize("kind", NO_TIME)
    def test_reads_without_time_return_and_tell_the_truth(self, tier: BlobTier, kind: str) -> None:
        keys = [key_of(i) for i in range(16)]
        self.put_blocks(tier, keys, 64 * KIB)
        places = [Destination(key, 64 * KIB) for key in keys]

        def read() -> None:
            deadline, report = self._in_a_hurry(kind)
            tier.get_into([place.want for place in places], deadline, report)
            for place, outcome in zip(places, report.outcomes(len(places)), strict=True):
                assert outcome not in (Outcome.MISS, Outcome.CORRUPT), "lack of time is no miss and no damage"
                if outcome is Outcome.DONE:
                    place.check(64 * KIB)
                place.check_guards()

        self._returns(read)
        self.must_find(tier, keys, 64 * KIB)

    @pytest.mark.parametrize("kind", NO_TIME)
    def test_writes_without_time_return_and_tell_the_truth(self, tier: BlobTier, kind: str) -> None:
        keys = [key_of(i) for i in range(16)]
        items = [make_item(key, 64 * KIB) for key in keys]
        outcomes: list[Outcome] = []

        def write() -> None:
            deadline, report = self._in_a_hurry(kind)
            tier.put_from(items, deadline, report)
            outcomes.extend(report.outcomes(len(items)))

        self._returns(write)
        assert Outcome.FULL not in outcomes, "lack of time is no lack of room"
        for item in items:
            poison(item.payload)
            poison(item.header)
        self.must_find(
            tier,
            [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.DONE],
            64 * KIB,
        )
        for key in keys:
            place = Destination(key, 64 * KIB)
            [outcome] = self.get(tier, [place])
            assert outcome in (Outcome.DONE, Outcome.MISS)
            assert self.never_lies(place, outcome, 64 * KIB) == (outcome is Outcome.DONE), (
                "a torn block was published"
            )
        self.put_blocks(tier, keys, 64 * KIB)
        self.must_find(tier, keys, 64 * KIB)

    @pytest.mark.parametrize("kind", ["expired", "cancelled"])
    def test_probe_without_time_returns_and_tells_the_truth(self, tier: BlobTier, kind: str) -> None:
        self.put_blocks(tier, [key_of(1)])
        seen: list[Presence] = []
        self._returns(lambda: seen.extend(tier.probe([key_of(1), key_of(2)], self.no_time(kind))))
        assert len(seen) == 2
        assert seen[0] in (Presence.PRESENT, Presence.UNKNOWN)
        assert seen[1] in (Presence.ABSENT, Presence.UNKNOWN)

    def test_close_without_time_returns(self) -> None:
        tier = self.make_tier()
        tier.start()
        self.put_blocks(tier, [key_of(i) for i in range(8)], 64 * KIB)
        self._returns(lambda: tier.close(self.no_time("expired")))

    def _returns(self, call: Callable[[], None]) -> None:
        returns(call, self.patience_s)

    # ---- hands off the buffers

    @pytest.mark.parametrize("kind", ["in_time", *NO_TIME])
    def test_buffers_are_let_go_when_the_call_returns(self, kind: str) -> None:
        keys = [key_of(i) for i in range(16)]
        with self.running(self.make_tier()) as tier:
            self.put_blocks(tier, keys, 64 * KIB)
            places = [Destination(key, 64 * KIB) for key in [*keys, *(key_of(100 + i) for i in range(16))]]
            deadline, report = (self.deadline(), Report()) if kind == "in_time" else self._in_a_hurry(kind)
            tier.get_into([place.want for place in places], deadline, report)
            for place in places:
                place.poison()
            self.must_find(tier, keys, 64 * KIB)
        assert all(place.is_poisoned() for place in places), (
            "a buffer was written to after the call had returned"
        )

    def test_sources_may_be_reused_when_the_call_returns(self, tier: BlobTier) -> None:
        keys = [key_of(i) for i in range(16)]
        items = [make_item(key, 64 * KIB) for key in keys]
        outcomes = self.put(tier, items)
        for item in items:
            poison(item.payload)
            poison(item.header)
        assert set(outcomes) == {Outcome.DONE}
        self.must_find(tier, keys, 64 * KIB)

    # ---- damaged bytes

    def _after_poke(self, tier: BlobTier, key: BlockKey, raw: bytes, length_bytes: int) -> None:
        """A damaged block never passes for whole, harms no other, and can be stored anew."""
        other = key_of(77)
        self.put_blocks(tier, [other])
        self.poke(tier, key, raw)
        place = Destination(key, length_bytes)
        [outcome] = self.get(tier, [place])
        assert outcome in (Outcome.DONE, Outcome.MISS, Outcome.CORRUPT), f"{outcome}: the tier itself is well"
        self.never_lies(place, outcome, length_bytes)
        self.must_find(tier, [other])
        tier.delete([key])
        self.must_miss(tier, [key])
        self.put_blocks(tier, [key], length_bytes)
        self.must_find(tier, [key], length_bytes)

    def _stored(self, tier: BlobTier, key: BlockKey, length_bytes: int) -> bytes:
        self.put_blocks(tier, [key], length_bytes)
        raw = self.peek(tier, key)
        assert raw is not None, "peek does not see a stored block"
        return raw

    def test_d03_peek_sees_header_and_payload(self, tier: BlobTier) -> None:
        assert self.peek(tier, key_of(1)) is None
        item = make_item(key_of(1), 9001)
        assert self.put(tier, [item]) == [Outcome.DONE]
        raw = self.peek(tier, key_of(1))
        assert raw is not None
        assert bytes(item.header[:HEADER_BYTES]) in raw
        assert payload_of(key_of(1), 9001) in raw
        assert self.peek(tier, key_of(2)) is None

    @pytest.mark.parametrize("cut_bytes", [*CUTS, "half", "all but one"])
    def test_d18_truncated(self, tier: BlobTier, cut_bytes: int | str) -> None:
        raw = self._stored(tier, key_of(1), 9001)
        length = {"half": len(raw) // 2, "all but one": len(raw) - 1}.get(str(cut_bytes))
        self._after_poke(tier, key_of(1), raw[: cut_bytes if isinstance(cut_bytes, int) else length], 9001)

    @pytest.mark.parametrize("extra_bytes", [1, 512, 4096, 70_000])
    def test_d18_extended(self, tier: BlobTier, extra_bytes: int) -> None:
        raw = self._stored(tier, key_of(1), 9001)
        self._after_poke(tier, key_of(1), raw + payload_of(key_of(2), extra_bytes), 9001)

    def test_d18_foreign_block(self, tier: BlobTier) -> None:
        self._stored(tier, key_of(1), 9001)
        raw = self._stored(tier, key_of(2), 9001)
        self._after_poke(tier, key_of(1), raw, 9001)

    @pytest.mark.parametrize("where", ["header_front", "header_end", "payload_front", "payload_end"])
    def test_d09_one_flipped_bit(self, tier: BlobTier, where: str) -> None:
        raw = bytearray(self._stored(tier, key_of(1), 9001))
        payload_at = raw.index(payload_of(key_of(1), 9001))
        at = {
            "header_front": raw.index(key_of(1)),
            "header_end": raw.index(key_of(1)) - 8 + HEADER_BYTES - 1,
            "payload_front": payload_at,
            "payload_end": payload_at + 9000,
        }[where]
        raw[at] ^= 0x10
        self._after_poke(tier, key_of(1), bytes(raw), 9001)

    def test_d18_pickle_runs_nothing(self, tier: BlobTier, tmp_path: Path) -> None:
        victim = tmp_path / "made_by_a_pickle"
        evil = b"cos\nmkdir\n(V" + str(victim).encode() + b"\ntR."
        raw = self._stored(tier, key_of(1), 9001)
        for poked in (evil, evil.ljust(len(raw), b"."), raw[:HEADER_BYTES] + evil):
            self._after_poke(tier, key_of(1), poked, 9001)
        assert not victim.exists()

    # ---- many threads

    def test_d21_many_threads(self, tier: BlobTier) -> None:
        """Each thread has keys of its own, which it must find, and all share some, which must never be wrong."""
        shared = [key_of(i) for i in range(6)]
        length_bytes = 20_001

        def work(number: int) -> None:
            dice = random.Random(number)
            own = [key_of(1000 * number + i) for i in range(1, 5)]
            for _ in range(12):
                self.put_blocks(tier, own, length_bytes)
                self.must_find(tier, own, length_bytes)
                key = dice.choice(shared)
                match dice.randrange(4):
                    case 0:
                        tier.delete([key])
                    case 1:
                        item = make_item(key, length_bytes, epoch=dice.randrange(100))
                        assert self.put(tier, [item]) == [Outcome.DONE]
                        poison(item.payload)
                    case _:
                        places = [Destination(each, length_bytes) for each in shared]
                        for place, outcome in zip(places, self.get(tier, places), strict=True):
                            assert outcome in (Outcome.DONE, Outcome.MISS, Outcome.CORRUPT)
                            self.never_lies(place, outcome, length_bytes)
                tier.delete(own[:1])
                self.must_miss(tier, own[:1])

        count = max(8, tier.caps.workers)
        run_together([partial(work, number) for number in range(1, count + 1)], self.patience_s)

    def test_d21_eight_threads_store_one_key(self, tier: BlobTier) -> None:
        key = key_of(1)
        items = [make_item(key, MIB // 2, epoch=epoch) for epoch in range(8)]

        def store(item: Item) -> None:
            assert self.put(tier, [item]) == [Outcome.DONE]

        run_together([partial(store, item) for item in items], self.patience_s)
        self.must_find(tier, [key], MIB // 2)
        if not tier.caps.evicts_itself:
            assert tier.usage().blocks == 1

    # ---- the end and a new start

    def test_close_leaves_no_thread_and_no_descriptor(self) -> None:
        def one_life() -> tuple[set[threading.Thread], Counter[str]]:
            with self.running(self.make_tier()) as tier:
                self.put_blocks(tier, [key_of(i) for i in range(4)], 64 * KIB)
                self.must_find(tier, [key_of(i) for i in range(4)], 64 * KIB)
                tier.clear(EVERYTHING, self.deadline())
            gc.collect()
            for thread in set(threading.enumerate()) - running:  # those that have begun to end may do so
                thread.join(self.patience_s / 10)
            return set(threading.enumerate()), _descriptors()

        running = set(threading.enumerate())

        threads, descriptors = one_life()  # what is loaded on first use is not a leak
        threads_after, descriptors_after = one_life()
        assert not threads_after - threads, f"still running: {threads_after - threads}"
        assert not descriptors_after - descriptors, f"still open: {dict(descriptors_after - descriptors)}"

    def test_d23_a_new_start_finds_what_was_done(self) -> None:
        kept = [key_of(i) for i in range(12)]
        deleted = [key_of(100 + i) for i in range(3)]
        cleared = [key_of(i, tenant=5) for i in range(3)]
        with self.running(self.make_tier()) as first:
            if not first.caps.persistent:
                pytest.skip("the tier does not outlive its process")
            headers = self.put_blocks(first, kept, 9001)
            self.put_blocks(first, [*deleted, *cleared])
            first.delete(deleted)
            assert first.clear(tenant_of(5), self.deadline()).complete
        with self.running(self.reopen(first)) as second:
            found = sorted(second.scan(), key=lambda header: header.key)
            wanted = sorted(headers, key=lambda header: header.key) if second.caps.scannable else []
            assert found == wanted, "scan does not yield the headers of what was stored"
            self.must_find(second, kept, 9001)
            self.must_miss(second, [*deleted, *cleared])
            if not second.caps.evicts_itself:
                assert second.usage().blocks == len(kept)
            self.put_blocks(second, deleted)
            self.must_find(second, deleted)

    def test_a_new_tier_is_empty(self, tier: BlobTier) -> None:
        assert list(tier.scan()) == []
        self.must_miss(tier, [key_of(i) for i in range(12)])


def _descriptors() -> Counter[str]:
    """The open file descriptors of this process, by what they lead to."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        found[target.split(":")[0] if target.startswith(("socket:", "pipe:", "anon_inode:")) else target] += 1
    return found
