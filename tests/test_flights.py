"""Single flight: a block is read once however many want it, and is given up when nobody waits any more."""

from __future__ import annotations

import random
import threading

import pytest

from tests.client_support import PATIENCE_S
from tierkv.clock import Deadline, FakeClock
from tierkv.flights import Batch, Flight, FlightTable, Run
from tierkv.ids import FamilyId
from tierkv.jobs import Priority
from tierkv.testing.threads import run_together


def flight_of(number: int) -> Flight:
    return Flight(FamilyId(number), generation=1, tier=1, parts=(0,), size_bytes=4096, depth=number)


class Waiter:
    """A run, and how often it was told that it is over."""

    def __init__(self) -> None:
        self.finished = 0
        self.run = Run(self._finish, Priority.ONBOARD)

    def _finish(self) -> None:
        self.finished += 1


@pytest.fixture
def table() -> FlightTable:
    return FlightTable()


def started(table: FlightTable, waiter: Waiter, *numbers: int) -> list[Flight]:
    flights = [flight_of(number) for number in numbers]
    for flight in flights:
        assert table.start_or_join([flight], waiter.run)
    batch = Batch(Deadline(FakeClock(), 10.0), flights)
    for flight in flights:
        flight.batch = batch
    return flights


def test_a_run_ends_when_its_last_flight_has_landed(table: FlightTable) -> None:
    waiter = Waiter()
    one, two = started(table, waiter, 1, 2)
    table.arm(waiter.run)
    table.land([one])
    assert waiter.finished == 0
    table.land([two])
    assert waiter.finished == 1
    assert len(table) == 0


def test_a_run_that_is_not_armed_yet_does_not_end(table: FlightTable) -> None:
    waiter = Waiter()
    [one] = started(table, waiter, 1)
    table.land([one])
    assert waiter.finished == 0
    table.arm(waiter.run)
    assert waiter.finished == 1


def test_a_run_without_flights_ends_when_it_is_armed(table: FlightTable) -> None:
    waiter = Waiter()
    table.arm(waiter.run)
    assert waiter.finished == 1


def test_the_second_who_wants_a_block_joins_the_first(table: FlightTable) -> None:
    first, second = Waiter(), Waiter()
    [flight] = started(table, first, 1)
    assert not table.start_or_join([flight_of(1)], second.run)
    for waiter in (first, second):
        table.arm(waiter.run)
    table.land([flight])
    assert (first.finished, second.finished) == (1, 1)


def test_nobody_joins_what_is_not_there(table: FlightTable) -> None:
    assert not table.join(FamilyId(1), Waiter().run)


def test_a_flight_goes_on_while_somebody_waits(table: FlightTable) -> None:
    first, second = Waiter(), Waiter()
    [flight] = started(table, first, 1)
    assert table.join(FamilyId(1), second.run)
    for waiter in (first, second):
        table.arm(waiter.run)
    table.leave(first.run)
    assert first.finished == 1
    assert flight.batch is not None
    assert not flight.batch.deadline.cancelled
    table.land([flight])
    assert second.finished == 1


def test_the_last_who_leaves_cancels_the_batch(table: FlightTable) -> None:
    first, second = Waiter(), Waiter()
    flights = started(table, first, 1, 2)
    batch = flights[0].batch
    assert batch is not None
    assert table.join(FamilyId(2), second.run)
    for waiter in (first, second):
        table.arm(waiter.run)
    table.leave(first.run)
    assert not batch.deadline.cancelled, "flight 2 of the batch is still wanted"
    table.leave(second.run)
    assert batch.deadline.cancelled
    assert len(table) == 2, "they are over when their I/O is, not sooner"
    assert table.land(flights) == []
    assert len(table) == 0
    assert (first.finished, second.finished) == (1, 1)


def test_who_comes_for_a_cancelled_flight_gets_it_begun_again(table: FlightTable) -> None:
    first, second = Waiter(), Waiter()
    [old] = started(table, first, 1)
    table.arm(first.run)
    table.leave(first.run)
    assert table.join(FamilyId(1), second.run)
    table.arm(second.run)
    old.trouble = "cancelled"
    assert table.land([old]) == [old]
    assert second.finished == 0
    new = flight_of(1)
    assert table.begin_again(old, new)
    assert table.land([new]) == []
    assert (second.finished, len(table)) == (1, 0)


def test_a_cancelled_flight_that_arrives_all_the_same_serves_its_heirs(table: FlightTable) -> None:
    first, second = Waiter(), Waiter()
    [old] = started(table, first, 1)
    table.arm(first.run)
    table.leave(first.run)
    assert table.join(FamilyId(1), second.run)
    table.arm(second.run)
    assert table.land([old]) == []
    assert (second.finished, len(table)) == (1, 0)


def test_nothing_is_begun_again_when_the_heirs_have_left(table: FlightTable) -> None:
    first, second = Waiter(), Waiter()
    [old] = started(table, first, 1)
    table.arm(first.run)
    table.leave(first.run)
    assert table.join(FamilyId(1), second.run)
    table.arm(second.run)
    old.trouble = "cancelled"
    assert table.land([old]) == [old]
    table.leave(second.run)
    assert second.finished == 1
    assert not table.begin_again(old, flight_of(1))
    assert len(table) == 0


def test_a_run_waits_for_nothing_behind_its_first_hole(table: FlightTable) -> None:
    first, second = Waiter(), Waiter()
    one, two, three = started(table, first, 1, 2, 3)
    assert table.join(FamilyId(3), second.run)
    for waiter in (first, second):
        table.arm(waiter.run)
    table.cut(one)
    assert (two.unwanted, three.unwanted) == (True, False), "the other run wants the third yet"
    assert first.finished == 0, "what fails is over when its I/O is"
    one.trouble = "miss"
    table.land([one])
    assert first.finished == 1
    assert first.run.why == {1: "miss"}
    late = Waiter()
    assert table.join(FamilyId(2), late.run)
    table.arm(late.run)
    two.trouble = "cancelled"
    assert table.land([two, three]) == [two], "who came after the cut is not forgotten"
    assert second.finished == 1


def test_what_lies_behind_a_hole_and_was_not_begun_is_cancelled(table: FlightTable) -> None:
    waiter = Waiter()
    [one] = started(table, waiter, 1)
    [two] = started(table, waiter, 2)
    [three] = started(table, waiter, 3)
    assert one.batch is not None
    assert two.batch is not None
    assert three.batch is not None
    table.arm(waiter.run)
    table.begin_batch(two.batch)
    table.cut(one)
    assert [flight.batch.deadline.cancelled for flight in (two, three) if flight.batch] == [False, True]


def test_d13_completions_that_come_twice_late_or_unknown_do_nothing(table: FlightTable) -> None:
    waiter = Waiter()
    [flight] = started(table, waiter, 1)
    table.arm(waiter.run)
    table.leave(waiter.run)
    table.leave(waiter.run)
    table.land([flight])
    table.land([flight])
    table.land([flight_of(9)])
    table.leave(waiter.run)
    table.arm(waiter.run)
    assert waiter.finished == 1


def test_d13_an_old_flight_does_not_end_a_new_one(table: FlightTable) -> None:
    first, second = Waiter(), Waiter()
    [old] = started(table, first, 1)
    table.arm(first.run)
    table.land([old])
    [new] = started(table, second, 1)
    table.arm(second.run)
    table.land([old])
    assert second.finished == 0
    assert len(table) == 1
    table.land([new])
    assert second.finished == 1


def test_finish_may_use_the_table(table: FlightTable) -> None:
    waiter = Waiter()
    [flight] = started(table, waiter, 1)
    inner = Waiter()
    run = Run(lambda: table.arm(inner.run), Priority.ONBOARD)
    assert table.join(FamilyId(1), run)
    for each in (waiter.run, run):
        table.arm(each)
    done = threading.Thread(target=table.land, args=([flight],), daemon=True)
    done.start()
    done.join(PATIENCE_S)
    assert not done.is_alive(), "finish is called with the lock held"
    assert inner.finished == 1


def test_many_threads_and_every_run_ends_once(table: FlightTable) -> None:
    """Threads start, join, land and leave the same few blocks; each run is told exactly once."""
    waiters: list[Waiter] = []
    lock = threading.Lock()

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(300):
            waiter = Waiter()
            with lock:
                waiters.append(waiter)
            mine = []
            for number in dice.sample(range(5), 2):
                flight = flight_of(number)
                flight.batch = Batch(Deadline(FakeClock(), 10.0), [flight])
                if table.start_or_join([flight], waiter.run):
                    mine.append(flight)
            table.arm(waiter.run)
            if dice.random() < 0.3:
                table.leave(waiter.run)
            dice.shuffle(mine)
            for flight in mine:
                table.land([flight])

    run_together([lambda seed=seed: work(seed) for seed in range(4)], PATIENCE_S)  # type: ignore[misc]
    assert len(table) == 0
    assert [waiter.finished for waiter in waiters] == [1] * len(waiters)
