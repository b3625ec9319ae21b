"""What an explanation says: why blocks were a miss, as plain values and in words."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from tierkv.departures import NOT_TAKEN, Departure
from tierkv.differences import Difference
from tierkv.ids import BlockHash, NamespaceDigest


class Cause(enum.Enum):
    """Where a block is, or why it is not to be had."""

    IN_HOST = "in host RAM"
    COLDER = "in a colder tier"
    NEVER_STORED = "never stored"
    NOT_TAKEN = "offered, but not stored"
    PENDING = "still being copied out of the engine"
    EVICTED = "evicted"
    EXPIRED = "expired"
    CLEARED = "cleared"
    CORRUPT = "failed verification"
    LOST = "no longer in the tier"
    INCOMPLETE = "incomplete"
    UNAVAILABLE = "in a tier that does not answer"
    NOT_ENOUGH = "no place to go on from"
    """The block is there, but a window or a state that an engine needs at its end is not."""
    BEHIND = "there, but behind one that is missing"


FINE = (Cause.IN_HOST, Cause.COLDER)

_CAUSES = {
    "expired": Cause.EXPIRED,
    "cleared": Cause.CLEARED,
    "corrupt": Cause.CORRUPT,
    "miss": Cause.LOST,
    "incomplete": Cause.INCOMPLETE,
}

WORDS = {
    "room": "room was needed, a colder tier holds it",
    "dropped_clean": "room was needed, and no colder tier wanted it",
    "dropped_dirty": "room was needed, and the colder tiers did not keep up",
    "capacity": "room was needed",
    "expired": "its time was over",
    "cleared": "it was cleared",
    "asked": "evict() was called",
    "outgrown": "it was stored again with a part that it lacked",
    "asleep": "the engine slept",
    "no_store": "its request wanted nothing stored",
    "corrupt": "it failed verification",
    "miss": "the tier no longer had it",
    "incomplete": "parts were missing for too long",
    "index_full": "the index was full",
    "unreachable": "a part of it or a block before it was not there",
    "no_room": "there was no room",
    "quota": "its tenant holds as much as it may",
    "no_parent": "the block before it was not stored",
    "copy_failed": "the copy out of the engine failed",
}
"""What the reasons of departures mean."""


def cause_of(departure: Departure) -> Cause:
    """What a departure means for who asks now."""
    if departure.tier == NOT_TAKEN:
        return Cause.NOT_TAKEN
    return _CAUSES.get(departure.reason, Cause.EVICTED)


@dataclass(frozen=True)
class Left:
    """A departure, told to people."""

    tier: str | None
    """``None`` when the block was offered and never got in."""
    reason: str
    age_s: float
    missing: tuple[str, ...] = ()
    """Parts that were missing."""

    def __str__(self) -> str:
        what = f"left {self.tier}" if self.tier is not None else "was not stored"
        why = WORDS.get(self.reason, self.reason.replace("_", " "))
        parts = f" ({', '.join(self.missing)})" if self.missing else ""
        return f"{what} {_ago(self.age_s)}: {why}{parts}"


@dataclass(frozen=True)
class BlockFate:
    """One block of the chain."""

    position: int
    block_hash: BlockHash
    cause: Cause
    detail: str = ""
    left: tuple[Left, ...] = ()
    """When it left which tier, newest first."""

    def __str__(self) -> str:
        told = [*([self.detail] if self.detail else []), *map(str, self.left)]
        return f"block {self.position} ({self.block_hash.hex()[:12]}): {self.cause.value}" + "".join(
            f"; {one}" for one in told
        )


@dataclass(frozen=True)
class Twin:
    """The same beginning of a prompt is (or was) stored under another name."""

    namespace: NamespaceDigest
    differs: tuple[Difference, ...]
    usable: bool
    left: Left | None = None
    """How its first block went, when it is not usable any more."""

    def __str__(self) -> str:
        where = "is stored" if self.usable else "was stored"
        gone = f" (its first block {self.left})" if self.left is not None else ""
        return f"the same beginning {where} under another name{gone}: {'; '.join(map(str, self.differs))}"


@dataclass(frozen=True)
class Explanation:
    """Why a prompt's blocks are, or are not, to be had. ``str()`` tells it in a few lines."""

    blocks: int
    """Full blocks that were asked about."""
    usable: int
    """Leading blocks that can be had now."""
    tokens: int
    """Tokens that an engine need not compute."""
    first_missing: BlockFate | None
    causes: Mapping[Cause, int]
    """Over all blocks; their sum is ``blocks``."""
    twins: tuple[Twin, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """What else bears on it: tiers that do not answer, a prompt that may not be cached as a whole."""

    def __str__(self) -> str:
        lines = [f"{self.usable} of {self.blocks} blocks can be had ({self.tokens} tokens)"]
        if self.first_missing is not None:
            lines.append(f"first missing: {self.first_missing}")
        if self.blocks:
            counts = (f"{count} {cause.value}" for cause, count in self.causes.items())
            lines.append(f"all blocks: {', '.join(counts)}")
        return "\n".join([*lines, *map(str, self.twins), *self.notes])


def _ago(age_s: float) -> str:
    if age_s < 120:
        return f"{age_s:.1f} s ago"
    return f"{age_s / 60:.0f} min ago" if age_s < 7200 else f"{age_s / 3600:.1f} h ago"
