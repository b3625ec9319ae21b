"""Shows that a contract has teeth: runs one of its tests on a broken implementation, without a pytest of its own."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tierkv.errors import TierKVError
from tierkv.testing.threads import Keeper


class Meeting:
    """A place between two steps where two threads wait for each other once: the race is lost every time."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._barrier = threading.Barrier(2, action=self._over.set)

    def wait(self) -> None:
        if not self._over.is_set():
            try:
                self._barrier.wait(5.0)
            except threading.BrokenBarrierError:
                self._over.set()


FAILURES = AssertionError | TierKVError | pytest.fail.Exception


def assert_catches(contract: type, test: str, tmp_path: Path, subject_fixture: str | None = None) -> None:
    """``test`` of the class ``contract`` must fail in at least one of its cases, by an assertion or an error of ours.

    ``subject_fixture`` names the contract's fixture that gives the subject; ``make_...`` makes it, and ``running``
    opens it where the contract has that.
    """
    method = getattr(contract, test)
    errors = [
        _error_of(contract, method, arguments, tmp_path, subject_fixture) for arguments in _cases(method)
    ]
    assert any(error is not None for error in errors), f"{test} passes on {contract.__name__}"
    strange = [error for error in errors if not isinstance(error, None | FAILURES)]
    if strange:
        raise strange[0]


def _cases(method: Any) -> Iterator[dict[str, Any]]:
    """The arguments of each case that ``pytest.mark.parametrize`` makes of ``method``."""
    axes = []
    for mark in getattr(method, "pytestmark", []):
        names, rows = mark.args[0], mark.args[1]
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",")]
            rows = [(row,) for row in rows] if len(names) == 1 else rows
        axes.append([dict(zip(names, row, strict=True)) for row in rows])
    for combination in itertools.product(*axes):
        yield {name: value for case in combination for name, value in case.items()}


def _error_of(
    contract: type, method: Any, arguments: dict[str, Any], tmp_path: Path, subject_fixture: str | None
) -> BaseException | None:
    subject = contract()
    wanted = method.__code__.co_varnames[: method.__code__.co_argcount]
    keeper = Keeper()
    with keeper, ExitStack() as stack:
        if "tmp_path" in wanted:
            arguments = {**arguments, "tmp_path": tmp_path}
        if subject_fixture in wanted:
            made = getattr(subject, f"make_{subject_fixture}")()
            running = stack.enter_context(subject.running(made)) if hasattr(subject, "running") else made
            arguments = {**arguments, subject_fixture: running}
        method(subject, **arguments)
    return keeper.error
