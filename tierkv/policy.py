"""What a policy is. Policies own ids, never bytes: they propose, the store commits.

Three protocols of one to four methods. All calls of one policy object come from the store under a lock, one at a time
(the metadata lock; promotion policies have another), so a policy needs no lock of its own and must be quick: no I/O, no
waiting, no failure.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, overload

from tierkv.ids import FamilyId
from tierkv.tier import Usage

Named = bytes
"""``bytes``, where a field takes that word."""


class BlockInfo(NamedTuple):
    """What a policy may know of a family when it enters a tier."""

    id: FamilyId
    parent: FamilyId | None
    """The family one block before it; ``None`` for a first block, or when the parent is not known here."""
    depth: int
    """Blocks before this one in its prompt."""
    bytes: int
    """All parts of the family in this tier."""
    tenant: int = 0
    """The tenant's tag, as a number: the first bytes of all its keys."""
    priority: int = 0
    """Higher stays longer, all else being equal."""
    expires_s: float | None = None
    """On the store's clock."""
    recompute_s: float | None = None
    """What it would cost to compute the block again, where it was measured."""
    block_hash: Named = b""
    """Names the block's content, the same when it comes back under another id: what ghosts are remembered by. Empty
    where it is not known."""


class InfoRun(Sequence[BlockInfo]):
    """Infos of new families of one prompt, each the parent of the next, that have no wishes. What is alike is said
    once: a policy that knows runs need not look at every info, to any other this is a sequence like all."""

    __slots__ = ("bytes", "depth", "hashes", "ids", "parent", "tenant")

    priority = 0

    def __init__(
        self,
        ids: Sequence[FamilyId],
        parent: FamilyId | None,
        depth: int,
        size_bytes: int,
        tenant: int,
        hashes: Sequence[Named] = (),
    ) -> None:
        """``parent`` and ``depth`` are those of the first. ``hashes``: one for each, or none."""
        self.ids = ids
        self.parent = parent
        self.depth = depth
        self.bytes = size_bytes
        self.tenant = tenant
        self.hashes = hashes

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, place: int) -> BlockInfo: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[BlockInfo]: ...

    def __getitem__(self, place: int | slice) -> BlockInfo | Sequence[BlockInfo]:
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(len(self.ids)))]
        at = range(len(self.ids))[place]
        parent = self.ids[at - 1] if at else self.parent
        block_hash = self.hashes[at] if self.hashes else b""
        return BlockInfo(
            self.ids[at], parent, self.depth + at, self.bytes, self.tenant, block_hash=block_hash
        )


class EvictionPolicy(Protocol):
    """Orders the families of one tier by who should leave first.

    The store only asks about families that may leave (no lease, no resident child: leaf-first is the store's), through
    ``evictable``. Ids are small integers that are reused after ``on_remove``.

    Every block of a lower priority leaves before any of a higher one. A policy that sees to it by itself says so with
    an attribute ``orders_priorities = True``; of any other the store keeps one for each priority
    (``tierkv.policies.by_priority``). A family whose priority changes is removed and inserted again.
    """

    name: str

    def on_insert(self, infos: Sequence[BlockInfo]) -> None:
        """Families that entered the tier by one call, in the order of their depth. Often an ``InfoRun``."""
        ...

    def on_hit(self, ids: Sequence[FamilyId]) -> None:
        """Families that one request used, in the order of their depth. Ids that are not in this tier are
        passed over."""
        ...

    def on_remove(self, ids: Sequence[FamilyId], *, evicted: bool) -> None:
        """Families that left. ``evicted`` is False for what was cleared, expired or corrupt, and leaves no ghost."""
        ...

    def victims(self, need: int, evictable: Callable[[FamilyId], bool]) -> Iterator[FamilyId]:
        """Who should leave, first first. Lazy: the caller stops when it has enough. Changes nothing. Looks at no more
        than ``4 * need + 64`` families in all."""
        ...

    def counters(self) -> Mapping[str, int]:
        """For metrics: plain, only growing."""
        ...


class Verdict(enum.Enum):
    """What an admission policy says of a block that could go to a colder tier."""

    ADMIT = "admit"
    REJECT = "reject"
    """Not worth it: the block counts as clean, since no tier that wants it lacks it."""
    THROTTLE = "throttle"
    """Not now: ask again later."""


class AdmissionPolicy(Protocol):
    """Decides which blocks a colder tier takes."""

    name: str

    def admit(self, info: BlockInfo, block_hash: bytes, usage: Usage) -> Verdict: ...

    def counters(self) -> Mapping[str, int]: ...


class Promotion(enum.Enum):
    """What to do with a block that a colder tier holds and a request wants."""

    RECOMPUTE = "recompute"
    """Dearer to load than to compute."""
    SERVE = "serve"
    """Load for this request; the first to go afterwards."""
    PROMOTE = "promote"
    """Load and keep in host RAM like a block that was just computed."""


@dataclass(frozen=True, slots=True)
class LoadQuote:
    """What loading a run of blocks would cost, from measured edge speeds."""

    tier: str
    blocks: int
    bytes: int
    tokens: int
    load_s: float | None
    """Expected time until the last block is in host RAM, queue included; ``None`` until the edge was measured."""
    compute_s: float | None
    """Expected time to compute the same tokens; ``None`` until the engine's prefill speed is known."""
    last_hash: Named = b""
    """Of the run's last block: what the run is recognised by when it is wanted again. Empty where it is not known."""


class PromotionPolicy(Protocol):
    """Decides whether a run is loaded from a colder tier."""

    name: str

    def decide(self, quote: LoadQuote, usage: Usage) -> Promotion:
        """``usage`` is that of host RAM, the tier that would keep the run."""
        ...

    def counters(self) -> Mapping[str, int]: ...
