"""Blocks exit host RAM: the way of nearly all that are evicted, in one loop. The counterpart of ``tierkv.entering``.

``Parting`` can take anything out of any tier: a family of which a part is missing, one that somebody holds, one whose
row waits for its children. A family that is whole in host RAM, that nobody holds, and that is either whole in a tier of
the store's own as well or nowhere else, needs none of these questions. What this leaves behind is the same to the last
bit; the invariants check both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierkv.index import DOOMED, HINT_ONLY, IN_HOST, NO_SLOT, SERVED, USABLE
from tierkv.residency import HOST, LEFT, LEFT_AND_REMOVED

if TYPE_CHECKING:
    from tierkv.ids import BlockHash, FamilyId, Slot
    from tierkv.index import Space
    from tierkv.residency import Residency

_IN_HOST = 1 << HOST
_PLAIN = IN_HOST | USABLE
_QUESTIONS = _PLAIN | DOOMED | HINT_ONLY


def exit_host(residency: Residency, families: Sequence[FamilyId], *, evicted: bool, reason: str) -> int:
    """Takes families of one namespace out of host RAM, in order (children before their parents), as long as there is no
    question about them, and forgets the rows of those that are then nowhere. Returns how many. Under the lock."""
    index = residency.index
    number, expected = index.space_of[families[0]], index.expected[families[0]]
    space: Space = index.spaces[number]
    held, children, known = index.residency[HOST], index.children[HOST], index.children_known
    held_in, whole_in, pins, state, dirty_in = (
        index.held_in,
        index.whole_in,
        index.pins,
        index.state,
        index.dirty,
    )
    parent_of, names, space_of, expected_of = index.parent, index.hashes, index.space_of, index.expected
    cells, owner, own_tiers, width = index.slot_cells, residency.owner, residency._own_tiers, index.parts
    slots: list[Slot] = []
    kept: list[BlockHash] = []
    their_parents: list[BlockHash | None] = []
    gone: list[FamilyId] = []
    hashes: list[BlockHash] = []
    parents: list[BlockHash | None] = []
    waiting: list[FamilyId] = []
    never_served = clean = done = 0
    for family in families:
        elsewhere = held_in[family] & ~_IN_HOST
        if (
            held[family] != expected
            or space_of[family] != number
            or expected_of[family] != expected
            or pins[family]
            or state[family] & _QUESTIONS != _PLAIN
            or (not whole_in[family] & own_tiers & elsewhere if elsewhere else known[family])
        ):
            break
        done += 1
        parent = parent_of[family]
        held[family] = 0
        if parent:
            children[parent] -= 1
        if dirty_in[family]:
            dirty_in[family] = 0
        else:
            clean += 1
        for cell in range(family * width, (family + 1) * width):
            slot = cells[cell]
            if slot != NO_SLOT:
                slots.append(slot)
                cells[cell] = NO_SLOT
                owner[slot] = 0
        if elsewhere:
            held_in[family] = elsewhere
            whole_in[family] &= ~_IN_HOST
            state[family] &= ~IN_HOST
            kept.append(names[family])  # type: ignore[arg-type]
            their_parents.append(names[parent])
            continue
        if not state[family] & SERVED:
            never_served += 1
        held_in[family] = whole_in[family] = 0
        gone.append(family)
        hashes.append(names[family])  # type: ignore[arg-type]
        parents.append(names[parent])
        if parent:
            known[parent] -= 1
            if not held_in[parent]:
                waiting.append(parent)
    if not done:
        return 0
    size, room = space.bytes_of(expected), space.room_of(expected)
    residency.host_bytes -= size * done
    residency.clean_bytes -= size * clean
    space.books.held[HOST] -= room * done
    space.books.clean_bytes -= room * clean
    residency.host_policy.on_remove(families[:done] if done < len(families) else families, evicted=evicted)
    residency.host.release(slots)
    now_s, name, events, departures = (
        residency.clock.now_s(),
        residency.tiers[HOST].name,
        residency.events,
        residency.departures,
    )
    if gone:
        events.append_run(now_s, LEFT_AND_REMOVED, space.digest, hashes, parents, name, reason)
        departures.note_run(number, hashes, expected, HOST, reason, now_s)
        if never_served:
            residency.counters.add(never_served, "never_served_blocks_total")
        index.remove_run(space, gone)
        for parent in waiting:
            residency._settle(parent)
    if kept:
        events.append_run(now_s, LEFT, space.digest, kept, their_parents, name, reason)
        departures.note_run(number, kept, expected, HOST, reason, now_s)
    residency.counters.add(done, "evicted_blocks_total", name, reason)
    return done
