"""A lease of one process that another one reads from: an engine's scheduler leases, its workers copy.

    loan = lend(lease)                             in the process that holds the lease
    with borrow(loan, chain, memory) as run: ...   in another one, which maps the same slots

A loan is plain data and holds nothing: whoever has lent keeps the lease until it hears that the copies are over. Should
it die before, the slots may be given to others; a borrower therefore compares the generations after each copy, which
``onboard`` does, and takes what it has read for nothing when they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tierkv.errors import ClosedError, HandleError
from tierkv.handles import Lease, SlotMemory
from tierkv.ids import FamilyId, Slot
from tierkv.keys import Chain


class Loan(NamedTuple):
    """Where the blocks of a lease lie: a row of ``parts`` cells for each block, -1 for a part that is not there."""

    instance: bytes
    """Of the memory that the slots are numbers in."""
    blocks: int
    slots: bytes
    """int32"""
    generations: bytes
    """uint32"""
    expected: bytes
    """int64 for each block: the bitmap of the parts that make it whole."""


class LentRun:
    """The blocks of a loan, as the lessor of a lease on them. Family i is block i of the run. Nothing is given back."""

    def __init__(self, memory: SlotMemory, parts: int, loan: Loan) -> None:
        self.memory = memory
        self._instance = loan.instance
        self._slots = np.frombuffer(loan.slots, dtype=np.int32).reshape(loan.blocks, parts)
        self._generations = np.frombuffer(loan.generations, dtype=np.uint32).reshape(loan.blocks, parts)
        self._expected = np.frombuffer(loan.expected, dtype=np.int64)

    def lease(self, chain: Chain, owner: str, at_s: float) -> Lease:
        return Lease(self, chain, [FamilyId(i) for i in range(len(self._slots))], owner, at_s)

    def slot_of(self, family: FamilyId, part: int) -> Slot:
        return Slot(self._slots.item(family, part))

    def expects(self, family: FamilyId) -> int:
        return int(self._expected[family])

    def still_holds(self, family: FamilyId, part: int) -> bool:
        """After a copy: whether the slot still held what was leased when it ended."""
        try:
            found = self.memory.generation(self.slot_of(family, part))
        except ClosedError:
            return False
        return found == int(self._generations[family, part])

    def whole(self, parts: Sequence[int]) -> int:
        """How many leading blocks still are what was leased, as far as these parts of them go."""
        for family in map(FamilyId, range(len(self._slots))):
            if not all(self.slot_of(family, part) < 0 or self.still_holds(family, part) for part in parts):
                return family
        return len(self._slots)

    def loan(self, blocks: int) -> Loan:
        """The leading blocks as plain data."""
        return Loan(
            self._instance,
            blocks,
            self._slots[:blocks].tobytes(),
            self._generations[:blocks].tobytes(),
            self._expected[:blocks].tobytes(),
        )

    def take_back(self, lease: Lease) -> None:
        pass

    def let_go(self, families: Sequence[FamilyId]) -> None:
        pass


def lend(lease: Lease) -> Loan:
    """What another process needs in order to read the lease's blocks. Raises ``HandleError`` after the release."""
    lessor = lease.lessor
    if lessor is None:
        raise HandleError("this lease was released already")
    if isinstance(lessor, LentRun):
        return lessor.loan(len(lease))
    parts = range(len(lease.chain.namespace.layout.parts))
    slots = [[lessor.slot_of(family, part) for part in parts] for family in lease.families]
    generation = lessor.memory.generation
    generations = [[generation(slot) if slot >= 0 else 0 for slot in row] for row in slots]
    return Loan(
        lessor.memory.instance,
        len(slots),
        np.array(slots, dtype=np.int32).tobytes(),
        np.array(generations, dtype=np.uint32).tobytes(),
        np.array([lessor.expects(family) for family in lease.families], dtype=np.int64).tobytes(),
    )


def borrow(loan: Loan, chain: Chain, memory: SlotMemory | None) -> Lease | None:
    """The lent blocks of ``chain`` in this process; ``None`` when ``memory`` is not the one that they lie in (the
    daemon is another one by now, or has not been met yet). Releasing it releases nothing."""
    if memory is None or memory.instance != loan.instance:
        return None
    run = LentRun(memory, len(chain.namespace.layout.parts), loan)
    return run.lease(chain, "borrower", float("inf"))
