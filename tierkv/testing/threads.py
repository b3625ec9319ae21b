"""Calls in threads of their own, so that one that hangs fails its test instead of holding up the run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType


class Keeper:
    """Keeps what was raised inside the ``with`` block, for whoever asks later."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return True


def run_together(calls: Sequence[Callable[[], None]], patience_s: float) -> None:
    """Runs all ``calls`` at once, each in a daemon thread that starts when all are ready. Raises what the first of
    them raised, or ``AssertionError`` when one is not back after ``patience_s``."""
    ready = threading.Barrier(len(calls))
    keepers = [Keeper() for _ in calls]

    def body(call: Callable[[], None], keeper: Keeper) -> None:
        with keeper:
            ready.wait(patience_s)
            call()

    threads = [
        threading.Thread(target=body, args=pair, name="contract-call", daemon=True)
        for pair in zip(calls, keepers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience_s)
        assert not thread.is_alive(), f"a call has not returned after {patience_s} s"
    for keeper in keepers:
        if keeper.error is not None:
            raise keeper.error


def returns(call: Callable[[], None], patience_s: float) -> None:
    """Runs ``call`` and raises what it raises, or ``AssertionError`` when it hangs."""
    run_together([call], patience_s)


@contextmanager
def switching_every(interval_s: float) -> Iterator[None]:
    """Threads lose their turn at the interpreter this often, in the middle of everything."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)
