"""A blob tier that fails: any tier behind a wrapper that spoils the calls that a ``Strike`` says."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from tierkv import frame
from tierkv.clock import Deadline
from tierkv.errors import FrameError
from tierkv.frame import HEADER_BYTES, FrameHeader
from tierkv.ids import BlockKey, KeyPrefix
from tierkv.testing.faults.strike import NEVER, Strike
from tierkv.testing.payloads import aligned, payload_of
from tierkv.tier import BlobTier, ClearResult, DoneCallback, Item, Outcome, Presence, TierCaps, Usage, Want
from tierkv.units import ALIGN_BYTES, align_up

_LOOK_S = 0.002


class InjectedError(Exception):
    """What a tier raises that should raise nothing. No error of tierkv, so nobody is prepared for it."""


class Way(enum.Enum):
    """How a call fails."""

    ERROR = "error"
    """Each block is answered ``UNAVAILABLE`` (a probe ``UNKNOWN``, a clear incomplete)."""
    RAISE = "raise"
    """The call raises ``InjectedError`` before it has done anything."""
    HALFWAY = "halfway"
    """The call does all of its work on the first block and then raises."""
    HANG = "hang"
    """The call comes back when its deadline is over, or sooner when ``release`` is called: then it goes on."""
    STUCK = "stuck"
    """Like a disk that does not come back: only ``release`` ends it, whatever the deadline says."""
    SHORT = "short"
    """Fewer bytes: a read brings only half of the block and says so; a write stores half."""
    FLIPPED = "flipped"
    """One bit of the payload is another one."""
    FOREIGN = "foreign"
    """The bytes of another block: a read brings its whole frame, which proves itself; a write stores its payload."""
    SLOW = "slow"
    """It takes a while and then goes well."""
    FALSE = "false"
    """A probe says that everything is there, a read finds nothing, a write says ``DONE`` and stores nothing, a delete
    or a clear does nothing and says that it did."""
    FULL = "full"
    """No room. Reads are answered ``MISS``."""
    NONSENSE = "nonsense"
    """The work is done, but what is answered is none of the protocol's answers."""


_DAMAGE = (Way.SHORT, Way.FLIPPED, Way.FOREIGN)

WAYS: dict[str, tuple[Way, ...]] = {
    "get_into": (
        Way.ERROR,
        Way.RAISE,
        Way.HALFWAY,
        Way.HANG,
        Way.STUCK,
        *_DAMAGE,
        Way.SLOW,
        Way.FALSE,
        Way.NONSENSE,
    ),
    "put_from": (
        Way.ERROR,
        Way.RAISE,
        Way.HALFWAY,
        Way.HANG,
        Way.STUCK,
        *_DAMAGE,
        Way.SLOW,
        Way.FALSE,
        Way.FULL,
        Way.NONSENSE,
    ),
    "probe": (Way.ERROR, Way.RAISE, Way.HANG, Way.STUCK, Way.SLOW, Way.FALSE, Way.NONSENSE),
    "clear": (Way.ERROR, Way.RAISE, Way.HANG, Way.STUCK, Way.SLOW, Way.NONSENSE),
    "delete": (Way.RAISE, Way.SLOW, Way.FALSE),
}
"""The ways that make sense for each call. A ``delete`` has no deadline, so it may be slow but not hang."""


class FaultyTier:
    """``tier`` behind a strike. All calls that are not struck go through untouched. As thread-safe as the tier.

    ``strike`` and ``way`` may be changed at any time. What hangs ends with ``release``, at ``close`` at the latest.
    """

    def __init__(
        self, tier: BlobTier, strike: Strike = NEVER, way: Way = Way.ERROR, *, slow_s: float = 0.02
    ) -> None:
        self.tier = tier
        self.name = tier.name
        self.strike = strike
        self.way = way
        self._slow_s = slow_s
        self._released = threading.Event()
        self._bits = count(1)
        self.hanging = 0
        """Calls that hang now."""

    @property
    def caps(self) -> TierCaps:
        return self.tier.caps

    def release(self) -> None:
        """Lets go on what hangs, and whatever would hang later."""
        self._released.set()

    # ---- the tier

    def start(self) -> None:
        self.tier.start()

    def close(self, deadline: Deadline) -> None:
        self.release()
        self.tier.close(deadline)

    def probe(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Presence]:
        if not self.strike.hits("probe"):
            return self.tier.probe(keys, deadline)
        if self.way is Way.FALSE:
            return [Presence.PRESENT] * len(keys)
        if self.way is Way.NONSENSE:
            return self.tier.probe(keys, deadline)[:-1]
        if self.way is Way.ERROR or not self._passes(deadline):
            return [Presence.UNKNOWN] * len(keys)
        return self.tier.probe(keys, deadline)

    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        if not self.strike.hits("get_into"):
            self.tier.get_into(wants, deadline, on_done)
            return
        if self.way is Way.HALFWAY:
            self.tier.get_into(wants[:1], deadline, on_done)
            raise InjectedError("get_into")
        spoil = {Way.SHORT: _shorten, Way.FLIPPED: self._flip, Way.FOREIGN: _replace_with_another}.get(
            self.way
        )
        if spoil is None:
            self._fail_or_go_on(wants, deadline, on_done, self.tier.get_into)
            return

        def spoiled(i: int, outcome: Outcome) -> None:
            if outcome is Outcome.DONE:
                spoil(wants[i])
            on_done(i, outcome)

        self.tier.get_into(wants, deadline, spoiled)

    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        if not self.strike.hits("put_from"):
            self.tier.put_from(items, deadline, on_done)
            return
        if self.way is Way.HALFWAY:
            self.tier.put_from(items[:1], deadline, on_done)
            raise InjectedError("put_from")
        if self.way in (Way.SHORT, Way.FLIPPED, Way.FOREIGN):
            self.tier.put_from([self._spoiled(item) for item in items], deadline, on_done)
            return
        self._fail_or_go_on(items, deadline, on_done, self.tier.put_from)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        if self.strike.hits("delete"):
            if self.way is Way.FALSE:
                return
            if self.way is Way.RAISE:
                raise InjectedError("delete")
            self._wait(self._slow_s)
        self.tier.delete(keys)

    def clear(self, prefix: KeyPrefix, deadline: Deadline) -> ClearResult:
        if self.strike.hits("clear"):
            if self.way is Way.FALSE:
                return ClearResult(0, complete=True)
            if self.way is Way.ERROR or not self._passes(deadline):
                return ClearResult(0, complete=False, detail="injected")
            if self.way is Way.NONSENSE:
                self.tier.clear(prefix, deadline)
                return None  # type: ignore[return-value]
        return self.tier.clear(prefix, deadline)

    def scan(self) -> Iterator[FrameHeader]:
        return self.tier.scan()

    def usage(self) -> Usage:
        return self.tier.usage()

    def status(self) -> dict[str, object]:
        return self.tier.status()

    # ---- failing

    def _fail_or_go_on(
        self,
        batch: Sequence[Want] | Sequence[Item],
        deadline: Deadline,
        on_done: DoneCallback,
        call: Callable[..., None],
    ) -> None:
        if self.way is Way.NONSENSE:
            call(batch, deadline, lambda i, outcome: on_done(i, outcome.value))
            return
        outcome = self._outcome(deadline, writes=call == self.tier.put_from)
        if outcome is None:
            call(batch, deadline, on_done)
            return
        for i in range(len(batch)):
            on_done(i, outcome)

    def _outcome(self, deadline: Deadline, *, writes: bool) -> Outcome | None:
        """``None`` when the call goes on after all."""
        if self.way is Way.ERROR:
            return Outcome.UNAVAILABLE
        if self.way is Way.FALSE:
            return Outcome.DONE if writes else Outcome.MISS
        if self.way is Way.FULL:
            return Outcome.FULL if writes else Outcome.MISS
        if self._passes(deadline):
            return None
        return Outcome.CANCELLED if deadline.cancelled else Outcome.TIMEOUT

    def _passes(self, deadline: Deadline) -> bool:
        """Raises, waits, or both; False when the time was over before the call could go on."""
        if self.way is Way.RAISE:
            raise InjectedError(self.name)
        if self.way is Way.SLOW:
            self._wait(self._slow_s)
        if self.way in (Way.HANG, Way.STUCK):
            self._hang(None if self.way is Way.STUCK else deadline)
        return not deadline.over()

    def _hang(self, deadline: Deadline | None) -> None:
        self.hanging += 1
        while not self._released.wait(_LOOK_S):
            if deadline is not None and deadline.over():
                break
        self.hanging -= 1

    def _wait(self, seconds: float) -> None:
        self._released.wait(seconds)

    # ---- spoiling

    def _next_bit(self) -> int:
        return self.strike.nth + next(self._bits)

    def _flip(self, want: Want) -> None:
        _flip_bit(want.payload[: want.stored_bytes] or want.header[:HEADER_BYTES], self._next_bit())

    def _spoiled(self, item: Item) -> Item:
        """A copy of the item with other bytes: what a failing medium would keep of it. The caller's are left alone."""
        payload = aligned(len(item.payload))
        _fill(payload, item.payload)
        stored_bytes = item.stored_bytes
        if self.way is Way.SHORT:
            stored_bytes //= 2
            payload = payload[: max(ALIGN_BYTES, align_up(stored_bytes))]
        elif self.way is Way.FLIPPED and stored_bytes:
            _flip_bit(payload[:stored_bytes], self._next_bit())
        elif self.way is Way.FOREIGN:
            _fill(payload[:stored_bytes], payload_of(_other(item.key), stored_bytes))
        return replace(item, payload=payload, stored_bytes=stored_bytes)


def _other(key: BlockKey) -> BlockKey:
    return BlockKey(key[:-1] + bytes([key[-1] ^ 1]))


def _flip_bit(buffer: memoryview, number: int) -> None:
    """Another place each time, in a way that is the same in every run."""
    at = number * 7919 % len(buffer)
    buffer[at] ^= 1 << number % 8


def _shorten(want: Want) -> None:
    half = want.stored_bytes // 2
    _fill(want.payload[half : want.stored_bytes], b"\0" * (want.stored_bytes - half))
    want.stored_bytes = half


def _replace_with_another(want: Want) -> None:
    """The frame of another block of the same size, whole and true: only its key tells that it is the wrong one."""
    try:
        header = frame.unpack(want.header)
    except FrameError:
        return
    other = _other(want.key)
    payload = payload_of(other, want.stored_bytes)
    total = frame.checksum(payload)
    _fill(want.payload[: want.stored_bytes], payload)
    changed = replace(header, key=other, decoded_checksum=total, stored_checksum=total)
    _fill(want.header[:HEADER_BYTES], frame.pack(changed))


def _fill(target: memoryview, source: bytes | memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8)[: len(source)], np.frombuffer(source, np.uint8))
