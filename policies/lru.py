"""Least recently used leaves first, and within one request the tail of the prompt before its head.

The order is one list from cold to hot for each priority. A request that hits a run of families moves them to the hot
end, its first block the hottest. A family that enters behind a resident parent is placed right behind it, on the cold
side: a prompt that is stored in several calls (chunked prefill, decoding) lies in the list as if it had been stored in
one, at the rank of the request that last used its parent. Evicting a head first would make its tail unreachable.

    cold   ... d c b a | C B A | z y x   hot        A, B, C: one prompt; its next block, D, is placed before C

The list is an unrolled linked list: cells of up to 64 ids, linked from cold to hot, and a column that says for each id
which cell holds it. Removal is exact (no entry ever outlives its family), so that a reused id cannot come back to life
and a walk from the cold end meets nothing but living families.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tierkv.ids import FamilyId
from tierkv.policy import BlockInfo, InfoRun

CELL_IDS = 64
"""A search inside a cell is linear; more ids a cell make single hits dearer and batches cheaper."""

FEW_IDS = 24
"""Up to here plain loops are quicker than numpy."""

MAX_PRIORITY = 127
"""Priorities beyond -127 to 127 count as these: the number of lists is bounded."""

_NOWHERE = 0

Ids = NDArray[np.int32]


class _Cell:
    """A stretch of one list: ids from hot to cold, so that a prompt's blocks stand in the order of their depth."""

    __slots__ = ("colder", "hotter", "ids", "number", "priority")

    def __init__(self, number: int, priority: int) -> None:
        self.number = number
        self.priority = priority
        self.ids = array("i")
        self.colder = self
        self.hotter = self


class LruPolicy:
    """Least recently used first, by priority; the tail of a prompt before its head.

    Memory: 4 bytes for each id up to the highest one, and 5 to 25 for each resident family (12 when cells are half
    full). A single call takes 2 to 3 us, one id of a big batch about 0.1 us. An id that is not resident is passed over
    in ``on_hit`` and ``on_remove``; inserting one that is resident renews it. Not thread-safe: the store calls it
    under its lock.
    """

    name = "lru"
    orders_priorities = True
    most_priority = MAX_PRIORITY

    def __init__(self, *, families: int = 1024) -> None:
        """``families``: how many ids to make room for at once; the column doubles when a higher id comes."""
        self._where_np: Ids = np.zeros(families, dtype=np.int32)
        self._where = memoryview(self._where_np)
        """By id the number of its cell. Zeroed memory comes into being as it is used, so doubling it takes little."""
        self._cells: list[_Cell] = [_Cell(_NOWHERE, 0)]
        self._priority_of_cell = array("i", [0])
        self._spare_numbers: list[int] = []
        self._ends: dict[int, _Cell] = {}
        """For each priority the knot of its ring: ``hotter`` is the coldest cell, ``colder`` the hottest."""
        self._priorities: list[int] = []
        self._resident = 0
        self._inserted = self._hit = self._removed = self._evicted = 0

    # -- the protocol ---------------------------------------------------------------------------------------------

    def on_insert(self, infos: Sequence[BlockInfo]) -> None:
        if type(infos) is InfoRun:  # quicker than isinstance, which asks an abstract class
            self._insert_run(infos.ids, infos.parent, infos.priority)
            return
        run: list[int] = []
        parent = last = None
        priority = 0
        for info in infos:
            if run and (info.parent != last or info.priority != priority):
                self._insert_run(run, parent, priority)
                run = []
            if not run:
                parent, priority = info.parent, info.priority
            last = info.id
            run.append(last)
        if run:
            self._insert_run(run, parent, priority)

    def on_hit(self, ids: Sequence[FamilyId]) -> None:
        left = len(ids)
        if left > CELL_IDS:
            left = self._move_cells(ids)
            self._hit += len(ids) - left
            ids = ids[:left]
        if left and self._move_stretch(ids):
            self._hit += left
            return
        for priority, run in self._take_out(ids):
            self._hit += len(run)
            self._push_hot(priority, run)

    def on_remove(self, ids: Sequence[FamilyId], *, evicted: bool) -> None:
        before = self._resident
        if not self._cut_end(ids):
            self._take_out(ids)
        self._removed += before - self._resident
        if evicted:
            self._evicted += before - self._resident

    def victims(self, need: int, evictable: Callable[[FamilyId], bool]) -> Iterator[FamilyId]:
        # The candidates are noted down at the start, so that the caller may remove what it got while it walks on.
        return self._offered(self._coldest(4 * need + 64, self._priorities), evictable)

    def _offered(
        self, coldest: Sequence[FamilyId], evictable: Callable[[FamilyId], bool]
    ) -> Iterator[FamilyId]:
        for family in coldest:
            if self._where[family] and evictable(family):
                yield family

    def counters(self) -> Mapping[str, int]:
        return {
            "inserted": self._inserted,
            "hit": self._hit,
            "removed": self._removed,
            "evicted": self._evicted,
        }

    def __len__(self) -> int:
        """Resident families."""
        return self._resident

    def _move_cells(self, ids: Sequence[FamilyId]) -> int:
        """Moves whole cells to the hot end as long as a request's blocks, from its tail on, are exactly those of a
        cell: so a long prompt lies after its first use. Returns how many blocks at its front are left to be moved."""
        left = len(ids)
        if max(ids[0], ids[-1]) >= len(self._where) if type(ids) is range else max(ids) >= len(self._where):
            return left
        run = _array_of(ids)
        while left:
            cell = self._cells[self._where[run[left - 1]]]
            first = left - len(cell.ids)
            if cell.number == _NOWHERE or first < 0 or cell.ids != run[first:left]:
                break
            self._relink_hottest(cell)
            left = first
        return left

    def _move_stretch(self, ids: Sequence[FamilyId]) -> bool:
        """Moves a request's blocks to the hot end as one, when they stand side by side in one cell, which they mostly
        do: by their cell, or inside it, or out of it. False, and nothing has changed, when they do not."""
        first, count = ids[0], len(ids)
        cell = self._cells[self._where[first]] if first < len(self._where) else self._cells[_NOWHERE]
        if cell.number == _NOWHERE or count > len(cell.ids):
            return False
        at = cell.ids.index(first)
        if count > 1 and cell.ids[at : at + count].tolist() != list(ids):
            return False
        hottest = self._ends[cell.priority].colder
        if cell is hottest:
            if at and count == 1:
                cell.ids.insert(0, cell.ids.pop(at))
            elif at:
                stretch = cell.ids[at : at + count]
                del cell.ids[at : at + count]
                cell.ids[0:0] = stretch
            return True
        if count == len(cell.ids):
            self._relink_hottest(cell)
            return True
        if count + len(hottest.ids) > CELL_IDS:
            return False
        hottest.ids[0:0] = cell.ids[at : at + count]
        del cell.ids[at : at + count]
        self._note(ids, hottest)
        if len(cell.ids) < CELL_IDS // 4:
            self._tidy(cell)
        return True

    def _relink_hottest(self, cell: _Cell) -> None:
        cell.hotter.colder, cell.colder.hotter = cell.colder, cell.hotter
        end = self._ends[cell.priority]
        cell.hotter, cell.colder = end, end.colder
        end.colder.hotter = end.colder = cell

    # -- placing --------------------------------------------------------------------------------------------------

    def _insert_run(self, run: Sequence[int], parent: int | None, priority: int) -> None:
        """Places families of one prompt that follow each other."""
        highest = max(run)
        if highest >= len(self._where):
            self._widen(highest)
        if len(run) > FEW_IDS or any(map(self._where.__getitem__, run)):
            self._take_out(run)
        self._inserted += len(run)
        if not -self.most_priority <= priority <= self.most_priority:
            priority = self.most_priority if priority > 0 else -self.most_priority
        if parent is not None and parent < len(self._where):
            cell = self._cells[self._where[parent]]
            if cell.number and cell.priority == priority:
                self._insert_behind(cell, parent, run)
                return
        self._push_hot(priority, run)

    def _widen(self, highest: int) -> None:
        known = self._where_np
        self._where_np = np.zeros(max(2 * len(known), highest + 1), dtype=np.int32)
        self._where_np[: len(known)] = known
        self._where = memoryview(self._where_np)

    def _insert_behind(self, cell: _Cell, parent: int, run: Sequence[int]) -> None:
        self._resident += len(run)
        at = cell.ids.index(parent) + 1
        if len(cell.ids) + len(run) <= CELL_IDS:
            cell.ids[at:at] = array("i", run)
            self._note(run, cell)
            return
        whole = cell.ids[:at] + array("i", run) + cell.ids[at:]
        # Evenly, and not full: more children of the same prompt will follow.
        pieces = -(-4 * len(whole) // (3 * CELL_IDS))
        size = -(-len(whole) // pieces)
        for start in range(0, len(whole), size):
            if start:
                cell = self._new_cell(cell.priority, hotter=cell)
            cell.ids = whole[start : start + size]
            self._note(cell.ids, cell)

    def _push_hot(self, priority: int, run: Sequence[int]) -> None:
        self._resident += len(run)
        end = self._ends.get(priority)
        if end is None:
            end = self._ends[priority] = _Cell(_NOWHERE, priority)
            bisect.insort(self._priorities, priority)
        hottest = end.colder
        if hottest is not end and len(hottest.ids) + len(run) <= CELL_IDS:
            hottest.ids[0:0] = array("i", run)
            self._note(run, hottest)
            return
        for stop in range(len(run), 0, -CELL_IDS):
            cell = self._new_cell(priority, hotter=end)
            cell.ids = array("i", run[max(0, stop - CELL_IDS) : stop])
            self._note(cell.ids, cell)

    def _note(self, ids: Sequence[int], cell: _Cell) -> None:
        """Writes down that ``cell`` holds ``ids``."""
        if len(ids) <= FEW_IDS:
            where, number = self._where, cell.number
            for ident in ids:
                where[ident] = number
        else:
            self._where_np[np.asarray(ids, dtype=np.int32)] = cell.number

    def _new_cell(self, priority: int, *, hotter: _Cell) -> _Cell:
        """A cell on the cold side of ``hotter``, still empty."""
        if self._spare_numbers:
            cell = _Cell(self._spare_numbers.pop(), priority)
            self._cells[cell.number] = cell
            self._priority_of_cell[cell.number] = priority
        else:
            cell = _Cell(len(self._cells), priority)
            self._cells.append(cell)
            self._priority_of_cell.append(priority)
        cell.hotter, cell.colder = hotter, hotter.colder
        cell.hotter.colder = cell.colder.hotter = cell
        return cell

    # -- taking out -----------------------------------------------------------------------------------------------

    def _take_out(self, ids: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
        """Takes families out of their lists; returns those that were there, by priority, in the order given."""
        return self._take_few(ids) if len(ids) <= FEW_IDS else self._take_many(ids)

    def _cut_end(self, ids: Sequence[int]) -> bool:
        """Takes ids out that are the cold end of one cell, coldest first, as victims mostly are. False, and nothing has
        changed, when they are not."""
        where, count = self._where, len(ids)
        cell = self._cells[where[ids[0]]] if count and ids[0] < len(where) else self._cells[_NOWHERE]
        if cell.number == _NOWHERE or cell.ids[: -count - 1 : -1] != array("i", ids):
            return False
        del cell.ids[-count:]
        for ident in ids:
            where[ident] = _NOWHERE
        self._resident -= count
        if len(cell.ids) < CELL_IDS // 4:
            self._tidy(cell)
        return True

    def _take_few(self, ids: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
        where, cells = self._where, self._cells
        taken: dict[int, list[int]] = {}
        for ident in ids:
            number = where[ident] if ident < len(where) else _NOWHERE
            if not number:
                continue
            where[ident] = _NOWHERE
            self._resident -= 1
            cell = cells[number]
            if cell.ids[-1] == ident:
                cell.ids.pop()
            else:
                cell.ids.remove(ident)
            if len(cell.ids) < CELL_IDS // 4:
                self._tidy(cell)
            if cell.priority in taken:
                taken[cell.priority].append(ident)
            else:
                taken[cell.priority] = [ident]
        return list(taken.items())

    def _take_many(self, ids: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
        wanted = np.array(ids, dtype=np.int32)
        if int(wanted.max()) >= len(self._where):
            wanted = wanted[wanted < len(self._where)]
        where = self._where_np
        numbers = where[wanted]
        # Of an id that was given twice only the first mention, written last, finds its own position here.
        positions = np.arange(len(wanted), dtype=np.int32)
        where[wanted[::-1]] = positions[::-1]
        once = (where[wanted] == positions) & (numbers != _NOWHERE)
        where[wanted] = _NOWHERE
        if not once.all():
            wanted, numbers = wanted[once], numbers[once]
        if not len(wanted):
            return []
        self._resident -= len(wanted)
        priorities = np.frombuffer(self._priority_of_cell, dtype=np.int32)[numbers]
        self._empty_cells(wanted, numbers)
        found = sorted(set(priorities.tolist()))
        return [(p, _sequence(wanted if len(found) == 1 else wanted[priorities == p])) for p in found]

    def _empty_cells(self, wanted: Ids, numbers: Ids) -> None:
        """Takes ``wanted`` out of the cells of these ``numbers``; neighbours of one cell go together."""
        starts = np.concatenate(([0], np.flatnonzero(numbers[1:] != numbers[:-1]) + 1))
        stops = [*starts[1:].tolist(), len(wanted)]
        cells, gone = self._cells, _sequence(wanted)
        sparse: list[_Cell] = []
        for number, start, stop in zip(numbers[starts].tolist(), starts.tolist(), stops, strict=True):
            cell = cells[number]
            if stop - start == 1:
                cell.ids.remove(gone[start])
            else:
                _cut(cell, gone[start:stop])
            if len(cell.ids) < CELL_IDS // 4:
                sparse.append(cell)
        # Only now: joining cells moves ids that the loop may still have been about to take out.
        for cell in sparse:
            if cells[cell.number] is cell and len(cell.ids) < CELL_IDS // 4:
                self._tidy(cell)

    def _tidy(self, cell: _Cell) -> None:
        """Drops an empty cell, and joins a sparse one with a neighbour that has room to spare."""
        if not cell.ids:
            self._drop_cell(cell)
            return
        for neighbour in (cell.hotter, cell.colder):
            if neighbour.number and len(neighbour.ids) + len(cell.ids) <= CELL_IDS * 3 // 4:
                if neighbour is cell.hotter:
                    neighbour.ids.extend(cell.ids)
                else:
                    neighbour.ids[0:0] = cell.ids
                self._note(cell.ids, neighbour)
                self._drop_cell(cell)
                return

    def _drop_cell(self, cell: _Cell) -> None:
        cell.hotter.colder, cell.colder.hotter = cell.colder, cell.hotter
        self._cells[cell.number] = self._cells[_NOWHERE]
        self._spare_numbers.append(cell.number)
        if cell.hotter is cell.colder is self._ends[cell.priority]:
            del self._ends[cell.priority]
            self._priorities.remove(cell.priority)

    # -- walking --------------------------------------------------------------------------------------------------

    def _coldest(self, count: int, priorities: Sequence[int]) -> Sequence[FamilyId]:
        """Up to ``count`` ids from the cold ends of the lists of these priorities."""
        found = array("i")
        for priority in priorities:
            end = self._ends[priority]
            cell = end.hotter
            while cell is not end and len(found) < count:
                found.extend(cell.ids[::-1])
                cell = cell.hotter
        return cast("Sequence[FamilyId]", found[:count])


def _array_of(ids: Sequence[int]) -> array[int]:
    if type(ids) is range:
        return _sequence(np.arange(ids.start, ids.stop, ids.step, dtype=np.int32))
    return array("i", ids)


def _sequence(ids: Ids) -> array[int]:
    return array("i", ids.tobytes())


def _cut(cell: _Cell, gone: array[int]) -> None:
    """Removes ``gone`` (all of them there, none twice) from a cell: mostly all of it, or a stretch in order."""
    if len(gone) == len(cell.ids):
        cell.ids = array("i")
        return
    at = cell.ids.index(gone[0])
    if cell.ids[at : at + len(gone)] == gone:
        del cell.ids[at : at + len(gone)]
        return
    leave = set(gone)
    cell.ids = array("i", [ident for ident in cell.ids if ident not in leave])
