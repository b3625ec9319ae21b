"""SimExecutor: one thread, two events for each piece of work, an order that only the seed chooses."""

import threading

import pytest

from tierkv.clock import FakeClock
from tierkv.errors import ClosedError
from tierkv.testing import SimExecutor


def story(seed: int) -> list[str]:
    """What happens when six pieces of work and two timers are given to two lanes."""
    told: list[str] = []
    clock = FakeClock()
    sim = SimExecutor(clock, seed)
    sim.open_lane("nvme", 2)
    sim.open_lane("valkey", 1)

    def give(number: int) -> None:
        def work() -> str:
            told.append(f"start {number}")
            return f"finish {number}"

        sim.run("nvme" if number % 2 else "valkey", work, told.append)

    for number in range(6):
        give(number)
    for delay_s in (2.0, 1.0):
        sim.call_later(delay_s, lambda delay_s=delay_s: told.append(f"timer {delay_s}"))
    while sim.step():
        assert threading.current_thread() is threading.main_thread()
    return told


def test_a_seed_is_the_reproduction() -> None:
    assert story(7) == story(7)
    assert len({tuple(story(seed)) for seed in range(20)}) > 10


def test_everything_happens_once_and_starts_come_before_finishes() -> None:
    for seed in range(50):
        told = story(seed)
        assert sorted(told) == sorted(
            [f"{what} {number}" for what in ("start", "finish") for number in range(6)]
            + ["timer 1.0", "timer 2.0"]
        )
        for number in range(6):
            assert told.index(f"start {number}") < told.index(f"finish {number}")
        assert told.index("timer 1.0") < told.index("timer 2.0")


def test_a_lane_has_no_more_workers_than_it_was_given() -> None:
    seen = set()
    for seed in range(50):
        busy = {0: 0, 1: 0}
        for event in story(seed):
            what, number = event.split(" ", 1)
            if what != "timer":
                lane = int(number) % 2
                busy[lane] += 1 if what == "start" else -1
                assert busy[lane] <= (1, 2)[lane]
                seen.add((lane, busy[lane]))
    assert (1, 2) in seen, "two workers of a lane never work at once"


def test_a_cancelled_timer_stays_silent_and_time_stands_still_on_its_own() -> None:
    clock = FakeClock(0.0)
    sim = SimExecutor(clock, 1)
    told: list[float] = []
    sim.call_later(5.0, lambda: told.append(clock.now_s()))
    sim.call_later(3.0, lambda: told.append(-1.0)).cancel()
    sim.settle()
    assert (told, clock.now_s()) == ([], 0.0)
    sim.pass_time(4.0)
    assert (told, clock.now_s()) == ([], 4.0)
    sim.pass_time(4.0)
    assert (told, clock.now_s()) == ([5.0], 8.0)


def test_waiting_in_vain_is_an_error() -> None:
    sim = SimExecutor(FakeClock(), 1)
    with pytest.raises(AssertionError, match="nothing is left"):
        sim.run_until(lambda: False)


def test_close_finishes_what_was_begun() -> None:
    sim = SimExecutor(FakeClock(), 1)
    sim.open_lane("nvme", 1)
    told: list[int] = []
    for number in range(3):
        sim.run("nvme", lambda number=number: number, told.append)
    assert sim.close(1.0) == []
    assert sorted(told) == [0, 1, 2]
    with pytest.raises(ClosedError):
        sim.run("nvme", lambda: 1, told.append)
