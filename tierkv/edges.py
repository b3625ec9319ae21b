"""An edge of the store: host RAM and one blob tier, with queue, breaker, speeds and the rules between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tierkv.codec import Codec
from tierkv.guard import GuardedTier
from tierkv.ids import FamilyId
from tierkv.index import Space
from tierkv.jobs import Job, Priority, TierQueue
from tierkv.keys import NamespaceSpec
from tierkv.policy import AdmissionPolicy
from tierkv.quote import CodecSpeed, EdgeSpeed
from tierkv.timing import Timing
from tierkv.turns import Turns

Write = Literal["through", "on_evict", "never"]

_FIRST_RETRY_S = 0.05
"""How long after a first failed write the next one is tried."""


class Backlog:
    """Families that wait, each of them once: so it is never longer than the index. Those of one namespace oldest first;
    the namespaces take turns. Under the catalog's lock; its length may be read without."""

    def __init__(self, space_of: Callable[[FamilyId], Space]) -> None:
        self._space_of = space_of
        self._line: Turns[FamilyId] = Turns()
        self._waiting: set[FamilyId] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, families: Iterable[FamilyId]) -> None:
        """Puts those that do not wait already at the end of the line."""
        for family in families:
            if family not in self._waiting:
                self._waiting.add(family)
                space = self._space_of(family)
                self._line.add(space.number, family, space.bytes_of(space.expected))

    def pop(self) -> FamilyId:
        """Takes the one whose turn it is out."""
        family = self._line.take()
        self._waiting.remove(family)
        return family

    def put_back(self, families: Sequence[FamilyId]) -> None:
        """To the front of the line, in their order."""
        for family in reversed(families):
            if family not in self._waiting:
                self._waiting.add(family)
                space = self._space_of(family)
                self._line.put_back(space.number, family, space.bytes_of(space.expected))


@dataclass(eq=False)
class Edge:
    """Both directions between host RAM and the blob tier with this number."""

    number: int
    tier: GuardedTier
    queue: TierQueue
    write: Write
    admission: AdmissionPolicy
    codec: Codec
    timeout_s: float
    """Deadline of one demotion or probe."""
    backlog: Backlog
    """Write-through: families to clean. Those that changed meanwhile are skipped."""
    read_speed: EdgeSpeed = field(default_factory=EdgeSpeed)
    write_speed: EdgeSpeed = field(default_factory=EdgeSpeed)
    codec_speed: CodecSpeed = field(default_factory=CodecSpeed)
    read_times: Timing = field(default_factory=Timing)
    """Of each call that reads a batch of blocks, however it ended."""
    write_times: Timing = field(default_factory=Timing)
    promised_bytes: int = 0
    """What the demotions under way are going to write."""
    rest_until_s: float = 0.0
    """The tier was full and nothing could leave it: no demotion is tried before this."""
    retry_at_s: float = 0.0
    """A write failed: no demotion is tried before this."""
    failures: int = 0
    """Demotions in a row in which a write failed."""
    clearing: int = 0
    """Clears that the tier is busy with: no demotion begins meanwhile, or it might be cleared with the rest."""
    _asking: bool = False
    cleaning: set[int] = field(default_factory=set)
    """Numbers of the demotion jobs that are not over yet."""

    @property
    def name(self) -> str:
        return self.tier.name

    @property
    def down(self) -> str:
        """Name of the edge towards the tier."""
        return f"host>{self.tier.name}"

    @property
    def up(self) -> str:
        """Name of the edge from the tier."""
        return f"{self.tier.name}>host"

    def back_off(self, now_s: float) -> None:
        """A write failed. The next try comes soon, and later each time, but no later than a breaker would try."""
        longest_s = max(self.tier.breaker.cooldown_s, _FIRST_RETRY_S)
        self.retry_at_s = now_s + min(_FIRST_RETRY_S * 2.0 ** min(self.failures, 32), longest_s)
        self.failures += 1

    def rests_s(self, now_s: float) -> float:
        """How long no demotion is tried; 0 when one may be tried now."""
        return max(0.0, self.rest_until_s - now_s, self.retry_at_s - now_s)

    def ask_usage(self) -> None:
        """Has a worker of the tier read how full it is, unless one is at it or the tier is ill. Returns at once."""
        if self._asking or not self.tier.breaker.ready():
            return
        self._asking = True
        job = Job(Priority.PROBE, f"usage>{self.tier.name}", 0, self._ask, self._asked)
        if not self.queue.submit(job):
            self._asking = False

    def _ask(self) -> None:
        self.tier.refresh_usage()

    def _asked(self) -> None:
        self._asking = False

    def dead(self) -> bool:
        """True while the tier takes nothing: it is ill or read-only."""
        return self.tier.breaker.is_open or not self.tier.usage().writable

    def behind(self) -> bool:
        """True while the tier cannot take what host RAM must give: it is dead or over its budget."""
        return self.queue.over_budget(self.down) or self.dead()


def in_vain(spec: NamespaceSpec, edges: Iterable[Edge]) -> str | None:
    """Why a namespace names a lossy codec and no edge will use it; ``None`` where one may, or where blocks come
    encoded, so that their layout declares no inside."""
    codec = spec.lossy_codec
    if codec is None or not any(group.inside for group in spec.layout.groups):
        return None
    used = {edge.name: edge.codec.name for edge in edges}
    if codec in used.values():
        return None
    said = ", ".join(f"{name}.codec is {has}" for name, has in used.items()) or "there is no colder tier"
    return f"a namespace of {spec.engine} names {codec}, but {said}: its blocks are stored as they are"
