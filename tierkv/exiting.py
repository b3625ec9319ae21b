"""Blocks exit host RAM: the way of nearly all that are evicted, by columns. The counterpart of ``tierkv.entering``.

``Parting`` can take anything out of any tier: a family of which a part is missing, one that somebody holds, one whose
row waits for its children. Families of one namespace that are whole in host RAM, that nobody holds, and that are all
either whole in a tier of the store's own as well or nowhere else, need none of these questions one by one: a column of
theirs is looked at, and written, at once. What this leaves behind is the same to the last bit; the invariants check
both alike.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.index import DOOMED, HINT_ONLY, IN_HOST, NO_SLOT, SERVED, USABLE
from tierkv.residency import HOST, LEFT, LEFT_AND_REMOVED

if TYPE_CHECKING:
    from tierkv.ids import FamilyId
    from tierkv.index import Space
    from tierkv.residency import Residency

FEWEST = 4
"""Below this one by one is as quick."""

_IN_HOST = 1 << HOST
_ONLY_HERE = bytes([_IN_HOST])
_PLAIN = IN_HOST | USABLE
_PLAIN_STATES = bytes(bits for bits in range(256) if bits & (_PLAIN | DOOMED | HINT_ONLY) == _PLAIN)
_SERVED_STATES = bytes(bits for bits in range(256) if bits & SERVED)


def exit_host(residency: Residency, families: Sequence[FamilyId], *, evicted: bool, reason: str) -> bool:
    """Takes families out of host RAM (children stand before their parents) and forgets the rows of those that are then
    nowhere. False, and nothing has changed, when there is a question about any of them. Under the lock."""
    index, count = residency.index, len(families)
    space: Space = index.spaces[index.space_of[families[0]]]
    expected = index.expected[families[0]]
    first, stop = min(families), max(families) + 1
    rows: Any = slice(first, stop) if stop - first == count else np.array(families)
    column = index.array
    state = column("state")[rows].tobytes()
    if (
        column("pins")[rows].tobytes().strip(b"\0")
        or state.translate(None, _PLAIN_STATES)
        or column("space_of")[rows].tobytes() != space.number_bytes * count
        or column("expected")[rows].tobytes() != expected.to_bytes(8, sys.byteorder) * count
    ):
        return False
    only_here = column("held_in")[rows].tobytes() == _ONLY_HERE * count
    parents: list[int] = column("parent")[rows].tolist()
    among = set(families)
    inner = sum([parent in among for parent in parents])
    if only_here:
        if int(column("children_known")[rows].sum()) != inner:
            return False
    elif column("whole_in")[rows].tobytes().translate(None, residency.whole_elsewhere):
        return False
    hashes = [index.hashes[family] for family in families]
    above = [index.hashes[index.parent[family]] for family in families]
    column("residency0")[rows] = 0
    _tell_parents(index.children[HOST], parents)
    dirty = column("dirty")[rows].tobytes()
    clean = dirty.count(0)
    if clean < count:
        column("dirty")[rows] = 0
    slots: list[Any] = index.slots[rows].reshape(-1).tolist()
    if index.parts > 1:
        slots = [slot for slot in slots if slot != NO_SLOT]
    index.slots[rows] = NO_SLOT
    owner = residency.owner
    for slot in slots:
        owner[slot] = 0
    size, room = space.bytes_of(expected), space.room_of(expected)
    residency.host_bytes -= size * count
    residency.clean_bytes -= size * clean
    space.books.held[HOST] -= room * count
    space.books.clean_bytes -= room * clean
    residency.host_policy.on_remove(families, evicted=evicted)
    residency.host.release(slots)
    now_s, name = residency.clock.now_s(), residency.tiers[HOST].name
    kinds = LEFT_AND_REMOVED if only_here else LEFT
    residency.events.append_run(now_s, kinds, space.digest, hashes, above, name, reason)
    residency.departures.note_run(space.number, hashes, expected, HOST, reason, now_s)  # type: ignore[arg-type]
    residency.counters.add(count, "evicted_blocks_total", name, reason)
    if only_here:
        never_served = len(state.translate(None, _SERVED_STATES))
        if never_served:
            residency.counters.add(never_served, "never_served_blocks_total")
        _forget(residency, space, families, rows, [p for p in parents if p and p not in among])
    else:
        column("held_in")[rows] &= 0xFF & ~_IN_HOST
        column("whole_in")[rows] &= 0xFF & ~_IN_HOST
        column("state")[rows] &= 0xFF & ~IN_HOST
    return True


def _tell_parents(children: Any, parents: Sequence[int]) -> None:
    for parent in parents:
        if parent:
            children[parent] -= 1


def _forget(
    residency: Residency, space: Space, families: Sequence[FamilyId], rows: Any, outside: Sequence[int]
) -> None:
    """These are nowhere now. ``outside``: their parents that are not among them, each as often as it had a child."""
    index = residency.index
    for name in ("held_in", "whole_in", "children_known"):
        index.array(name)[rows] = 0
    index.remove_run(space, families)
    for parent in outside:
        index.children_known[parent] -= 1
    for parent in outside:
        if not index.held_in[parent]:
            residency._settle(parent)  # type: ignore[arg-type]
