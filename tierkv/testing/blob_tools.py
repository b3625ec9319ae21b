"""What the tests of the blob-tier contract share: the hooks that a subclass fills, and the calls with their checks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tierkv.clock import Deadline, SystemClock
from tierkv.errors import FrameError
from tierkv.frame import FrameHeader, unpack
from tierkv.ids import BlockKey
from tierkv.testing.payloads import Destination, make_item
from tierkv.tier import BlobTier, Item, Outcome, Presence
from tierkv.units import MIB


class Report:
    """An ``on_done`` that notes what it is told and by whom."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self._seen: list[tuple[int, Outcome, int]] = []
        self._then = then

    def __call__(self, i: int, outcome: Outcome) -> None:
        self._seen.append((i, outcome, threading.get_ident()))
        self._then()

    def outcomes(self, count: int) -> list[Outcome]:
        """In the batch's order, after the check that each block was reported once and from this thread."""
        reported = sorted(i for i, _, _ in self._seen)
        assert reported == list(range(count)), f"of {count} blocks these were reported: {reported}"
        strangers = {thread for _, _, thread in self._seen} - {threading.get_ident()}
        assert not strangers, "on_done was called from another thread than the caller's"
        return [outcome for _, outcome, _ in sorted(self._seen, key=lambda entry: entry[0])]


class BlobTierSubject:
    """The tier under test. Each test runs on a tier of its own."""

    patience_s = 60.0
    """A call that is not back after this is taken to hang."""
    fill_limit_bytes = 256 * MIB
    """Tiers with more capacity than this are not filled up."""

    # ---- what a subclass gives

    def make_tier(self) -> BlobTier:
        """A new, empty tier, not started."""
        raise NotImplementedError("give the contract a tier: override make_tier")

    def peek(self, tier: Any, key: BlockKey) -> bytes | None:
        """Header and payload as they lie there, read without the tier; ``None`` when there are none."""
        raise NotImplementedError("override peek")

    def poke(self, tier: Any, key: BlockKey, raw: bytes) -> None:
        """Replaces the stored bytes of a key that is there, without the tier. Where the medium keeps a length, the
        length becomes that of ``raw``; where it cannot, what is missing becomes zeros and what is too much is cut."""
        raise NotImplementedError("override poke")

    def reopen(self, tier: Any) -> BlobTier:
        """A tier, not started, on what the closed ``tier`` left behind."""
        raise NotImplementedError("a tier whose caps say persistent overrides reopen")

    # ---- tools

    def deadline(self, timeout_s: float | None = None) -> Deadline:
        return Deadline(SystemClock(), self.patience_s if timeout_s is None else timeout_s)

    def no_time(self, kind: str) -> Deadline:
        deadline = self.deadline(0.0 if kind == "expired" else None)
        if kind == "cancelled":
            deadline.cancel()
        return deadline

    @contextmanager
    def running(self, tier: BlobTier) -> Iterator[BlobTier]:
        tier.start()
        try:
            yield tier
        finally:
            tier.close(self.deadline())

    @pytest.fixture
    def tier(self) -> Iterator[BlobTier]:
        with self.running(self.make_tier()) as tier:
            yield tier

    def put(self, tier: BlobTier, items: Sequence[Item], deadline: Deadline | None = None) -> list[Outcome]:
        report = Report()
        tier.put_from(items, deadline or self.deadline(), report)
        return report.outcomes(len(items))

    def get(
        self, tier: BlobTier, places: Sequence[Destination], deadline: Deadline | None = None
    ) -> list[Outcome]:
        report = Report()
        tier.get_into([place.want for place in places], deadline or self.deadline(), report)
        for place in places:
            place.check_guards()
        return report.outcomes(len(places))

    def put_blocks(
        self, tier: BlobTier, keys: Sequence[BlockKey], length_bytes: int = 4097
    ) -> list[FrameHeader]:
        """Stores a block for each key; gives their headers."""
        items = [make_item(key, length_bytes) for key in keys]
        assert set(self.put(tier, items)) <= {Outcome.DONE}
        return [unpack(item.header) for item in items]

    def must_find(self, tier: BlobTier, keys: Sequence[BlockKey], length_bytes: int = 4097) -> None:
        for key in keys:
            place = Destination(key, length_bytes)
            assert self.get(tier, [place]) == [Outcome.DONE], f"{key.hex()} is not found"
            place.check(length_bytes)

    def must_miss(self, tier: BlobTier, keys: Sequence[BlockKey], length_bytes: int = 4097) -> None:
        places = [Destination(key, length_bytes) for key in keys]
        assert set(self.get(tier, places)) <= {Outcome.MISS}
        assert Presence.PRESENT not in tier.probe(keys, self.deadline())

    def never_lies(self, place: Destination, outcome: Outcome, length_bytes: int) -> bool:
        """True when the block came and proves itself; then it must be the right one."""
        if outcome is not Outcome.DONE:
            return False
        try:
            place.verified()
        except FrameError:
            return False
        place.check(length_bytes)
        return True
