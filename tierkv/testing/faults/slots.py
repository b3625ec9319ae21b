"""Host RAM that has no slot to give, and a copier whose copies fail, hang, come late or come twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tierkv.arena import Arena
from tierkv.copier import Copier, CopyPart, PagedKV, ReadyEvent
from tierkv.ids import Slot
from tierkv.layout import Layout
from tierkv.testing.faults.strike import NEVER, Strike
from tierkv.tiers.host import HostTier

Done = Callable[[str | None], None]


class FaultyHost(HostTier):
    """A host tier whose ``reserve`` is refused where ``strike`` says, as if the arena were full of leased blocks."""

    def __init__(self, arena: Arena, strike: Strike = NEVER) -> None:
        super().__init__(arena)
        self.strike = strike

    def reserve(self, count: int, slot_bytes: int) -> list[Slot] | None:
        if self.strike.hits("reserve"):
            return None
        return super().reserve(count, slot_bytes)


class FaultyCopier:
    """A copier whose struck calls (``offload``, ``onboard``) go wrong in one of four ways:

    ``error`` (nothing is copied, and that is said), ``hang`` (nothing is copied or said before ``release``), ``late``
    (the copy is made, its end is told only at ``release``), ``twice`` (the end is told twice). Thread-safe, as the
    copier behind it is.
    """

    WAYS = ("error", "hang", "late", "twice")

    def __init__(self, copier: Copier, strike: Strike = NEVER, way: str = "error") -> None:
        assert way in self.WAYS, f"{way!r}: one of {self.WAYS}"
        self._copier = copier
        self.strike = strike
        self.way = way
        self._lock = threading.Lock()
        self._held: list[Callable[[], None]] = []

    def check(self, kv: PagedKV, layout: Layout) -> None:
        self._copier.check(kv, layout)

    def offload(self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: Done) -> None:
        self._call("offload", lambda tell: self._copier.offload(kv, parts, ready, tell), done)

    def onboard(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        done: Done,
        on_layer: Callable[[int, int], None] | None = None,
        ready: ReadyEvent | None = None,
    ) -> None:
        self._call("onboard", lambda tell: self._copier.onboard(kv, parts, tell, on_layer, ready), done)

    @property
    def held(self) -> int:
        """Calls and ends that are held back now."""
        return len(self._held)

    def release(self) -> None:
        """Makes the calls and tells the ends that were held back."""
        with self._lock:
            held, self._held = self._held, []
        for call in held:
            call()

    def _call(self, name: str, copy: Callable[[Done], None], done: Done) -> None:
        if not self.strike.hits(name):
            copy(done)
        elif self.way == "error":
            done("injected")
        elif self.way == "hang":
            self._hold(lambda: copy(done))
        elif self.way == "late":
            copy(lambda error: self._hold(lambda: done(error)))
        else:
            copy(lambda error: _twice(done, error))

    def _hold(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._held.append(call)


def _twice(done: Done, error: str | None) -> None:
    done(error)
    done(error)
