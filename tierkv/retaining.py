"""What a block may keep when several want it, each in its own way: the most that anybody wants.

The highest priority counts, the latest end, the coldest tier that anybody allows. A block is of no use without those
before it, so a wish reaches back to the head of its chain: no ancestor leaves sooner than what hangs from it. A wish
can raise, never lower; ``client.clear`` takes a block away whatever anybody wished.

An end that is put off must reach the copies in colder tiers too: for each tier whose copy still names the old end the
family has a bit in the column ``stale``, and is dirty there until it was written again.

Functions over the catalog. Those with an underscore expect its lock to be held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tierkv.arriving import Arriving
from tierkv.errors import ConfigError
from tierkv.frame import FrameHeader
from tierkv.ids import BlockHash, FamilyId
from tierkv.index import DOOMED, IN_HOST, SERVED_ONLY, Space
from tierkv.residency import HOST, LOCK_BATCH
from tierkv.retention import MAX_PRIORITY, MAX_TTL_S, NO_WISH, Retention, Stay

WORTH_WRITING = 0.1
"""A copy in a colder tier is written again for an end that is later by this share of the wished time, not for less: a
prompt that is used every second would be rewritten every second. So an end may come that much early."""

_ANY_TIER = 0xFF


def stay_of(residency: Arriving, retention: Retention, *, loads: bool = False) -> Stay:
    """A retention in the store's terms, from now on. ``loads``: for a call that stores nothing, so it cannot say where
    blocks may go. Raises ``ConfigError`` for a tier that this store does not have."""
    if not retention.priority and retention.ttl_s is None and retention.coldest is None and not loads:
        return NO_WISH
    ttl_s = math.inf if retention.ttl_s is None else retention.ttl_s
    expires_s = None if retention.ttl_s is None else residency.clock.now_s() + ttl_s
    barred = _ANY_TIER if loads else _barred_by(residency, retention.coldest)
    return Stay(int(retention.priority), expires_s, ttl_s, barred)


def _barred_by(residency: Arriving, coldest: str | None) -> int:
    if coldest is None:
        return 0
    names = [tier.name for tier in residency.tiers]
    if coldest not in names:
        raise ConfigError("coldest", coldest, f"this store has the tiers {', '.join(names)}")
    return _ANY_TIER & ~((2 << names.index(coldest)) - 1)


def stay_of_frame(residency: Arriving, header: FrameHeader, tier: int) -> Stay:
    """What a stored frame says of its block."""
    if not (header.priority or header.expires_ms or header.no_colder):
        return NO_WISH
    expires_s = None
    if header.expires_ms:
        left_s = min(header.expires_ms / 1000 - residency.clock.unix_s(), MAX_TTL_S)
        expires_s = residency.clock.now_s() + left_s
    barred = _ANY_TIER & ~((2 << tier) - 1) if header.no_colder else 0
    return Stay(max(header.priority, -MAX_PRIORITY), expires_s, math.inf, barred)


# -- one family ---------------------------------------------------------------------------------------------------


def begin_stay(residency: Arriving, family: FamilyId, stay: Stay) -> None:
    """Under the lock: the family is about to enter host RAM, or was found in a tier. Of one that no tier of the store's
    own holds nothing is known yet, so the wish is all there is."""
    if stay is NO_WISH and not residency.retains:
        return
    if residency._in_own_tier(family):
        _raise(residency, family, stay, anew=True)
        return
    index = residency.index
    index.priority[family] = stay.priority
    index.barred[family] = stay.barred
    residency.retains = True
    if stay.expires_s is None or stay.expires_s == math.inf:
        index.expires_s[family] = 0.0
    else:
        index.expires_s[family] = stay.expires_s
        residency.has_expiry = True


def _raise(residency: Arriving, family: FamilyId, stay: Stay, *, anew: bool = False) -> bool:
    """Gives a family what it lacks of a wish. False when it lacked nothing: then its ancestors do not either.
    ``anew``: somebody brings the block once more, so that one past its end begins a new life."""
    index = residency.index
    if index.state[family] & DOOMED:
        return False
    changed = _put_off(residency, family, stay, anew)
    widened = index.barred[family] & ~stay.barred
    if widened:
        index.barred[family] &= stay.barred
        _now_lacked_by(residency, family, residency._missing_tiers(family) & widened)
    if stay.priority > index.priority[family] or index.state[family] & SERVED_ONLY:
        index.priority[family] = max(stay.priority, index.priority[family])
        index.state[family] &= ~SERVED_ONLY
        _tell_anew(residency, family)
        changed = True
    residency.retains = True
    return changed or bool(widened)


def _put_off(residency: Arriving, family: FamilyId, stay: Stay, anew: bool) -> bool:
    """Moves the end of a family; its copies in colder tiers then name the wrong one."""
    index = residency.index
    old_s = index.expires_s[family]
    if not old_s:
        return False
    new_s = stay.expires_s
    colder = index.held_in[family] & ~(1 << HOST)
    if old_s <= residency.clock.now_s():
        if not anew:
            return False
        new_s = math.inf if new_s is None else new_s
    elif new_s is None or new_s <= old_s or (colder and new_s - old_s < WORTH_WRITING * stay.ttl_s):
        return False
    index.expires_s[family] = 0.0 if new_s == math.inf else new_s
    index.stale[family] |= colder
    if index.dirty[family]:
        residency.on_dirty((family,))  # past its end it had lost its place in the line
    _now_lacked_by(residency, family, colder & residency._missing_tiers(family))
    return True


def _note_written(residency: Arriving, family: FamilyId, tier: int, written_s: float) -> None:
    """A tier has a new copy, which names ``written_s`` as the family's end. That may have been put off while the copy
    was on its way: then no tier had it that could have become stale."""
    index = residency.index
    end_s = index.expires_s[family]
    if not written_s or end_s == written_s:
        return
    if not end_s or end_s - written_s >= WORTH_WRITING * (end_s - residency.clock.now_s()):
        index.stale[family] |= 1 << tier
        _now_lacked_by(residency, family, 1 << tier & residency._missing_tiers(family))


def _now_lacked_by(residency: Arriving, family: FamilyId, tiers: int) -> None:
    """These tiers need the family in host RAM written to them."""
    if not residency.index.state[family] & IN_HOST:
        return
    for tier in range(1, len(residency.tiers)):
        if tiers >> tier & 1:
            residency._make_dirty(family, tier)


def _tell_anew(residency: Arriving, family: FamilyId) -> None:
    """The family's priority has changed: to the policies it is as if it had just come."""
    residency._tell_arrivals()
    whole_in = residency.index.whole_in[family]
    for tier in residency.tiers:
        if tier.policy is None or not whole_in >> tier.number & 1:
            continue
        if (tier.number, family) not in residency._following and not tier.policy.is_parked(family):
            tier.policy.on_remove([family], evicted=False)
            tier.policy.on_insert([residency.info(family, tier.number)])


# -- many ---------------------------------------------------------------------------------------------------------


def raise_run(
    residency: Arriving,
    space: Space,
    hashes: Sequence[BlockHash],
    positions: range,
    stay: Stay,
    *,
    anew: bool = False,
) -> int:
    """Gives those of the blocks that are known, and their ancestors, what they lack of a wish. Returns how many stay
    beyond it, since somebody else wants them longer or further down."""
    if not positions or (stay is NO_WISH and not residency.retains):
        return 0
    if positions.start:
        raise_line(residency, space, hashes[positions.start - 1], stay)
    beyond = 0
    for start in range(positions.start, positions.stop, LOCK_BATCH):
        with residency.gate, residency.lock:
            for position in range(start, min(start + LOCK_BATCH, positions.stop)):
                family = space.get(hashes[position])
                if family is not None:
                    _raise(residency, family, stay, anew=anew)
                    beyond += _stays_beyond(residency, family, stay)
    return beyond


def _stays_beyond(residency: Arriving, family: FamilyId, stay: Stay) -> bool:
    index = residency.index
    expires_s, wished_s = index.expires_s[family], stay.expires_s
    longer = wished_s is not None and wished_s != math.inf and (not expires_s or expires_s > wished_s)
    return longer or bool(stay.barred & ~index.barred[family])


def raise_line(residency: Arriving, space: Space, block_hash: BlockHash, stay: Stay) -> None:
    """A block and its ancestors, up to the first that lacks nothing."""
    index = residency.index
    family, generation = FamilyId(0), 0
    while True:
        with residency.gate, residency.lock:
            if not family:
                family = space.get(block_hash) or FamilyId(0)
                generation = index.generation[family]
            for _ in range(LOCK_BATCH):
                if (
                    not family
                    or index.generation[family] != generation
                    or not _raise(residency, family, stay)
                ):
                    return
                family = FamilyId(index.parent[family])
                generation = index.generation[family]
            if not family:
                return
