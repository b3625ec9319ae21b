"""Work of the HTTP face that may block: in threads, so that the event loop never waits, and only so many at once.

The threads are daemons, unlike those of ``concurrent.futures``: a daemon that is told to stop does not wait for a
prefetch that somebody asked for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from tierkv.errors import TierKVError

T = TypeVar("T")


class Busy(TierKVError):
    """As many calls as are taken are under way or waiting."""


class Bodies:
    """Memory for what requests bring along, of all together: many that are long, or begun and not ended, would else
    take any amount. For the event loop's thread."""

    def __init__(self, most_bytes: int) -> None:
        self._left_bytes = most_bytes

    @contextmanager
    def one(self) -> Iterator[Callable[[int], None]]:
        """Gives what takes memory for one request, until the end of the ``with``. It raises ``Busy``."""
        taken_bytes = 0

        def take(size_bytes: int) -> None:
            nonlocal taken_bytes
            if size_bytes > self._left_bytes:
                raise Busy("the bodies of other requests fill the memory that there is for them")
            self._left_bytes -= size_bytes
            taken_bytes += size_bytes

        try:
            yield take
        finally:
            self._left_bytes += taken_bytes


class Workers(Generic[T]):
    """``run`` is for the event loop's thread."""

    def __init__(self, name: str, at_once: int, waiting: int, wait_s: float) -> None:
        self._name = name
        self._places = asyncio.Semaphore(at_once)
        self._most_waiting = waiting
        self._wait_s = wait_s
        self._waiting = 0

    async def run(self, work: Callable[[], T]) -> T | None:
        """What ``work`` gives; ``None`` when it raised (its thread has said so). Raises ``Busy``."""
        await self._take_place()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T | None] = loop.create_future()

        def done(result: T | None) -> None:
            self._places.release()  # only now: who asked may have gone long ago
            if not future.done():
                future.set_result(result)

        def call() -> None:
            result = None
            try:
                result = work()
            finally:
                if not loop.is_closed():
                    _tell(loop, done, result)

        try:
            threading.Thread(target=call, name=self._name, daemon=True).start()
        except RuntimeError as error:  # the system gives no more threads
            self._places.release()
            raise Busy(f"no thread can be had: {error}") from error
        return await future

    async def _take_place(self) -> None:
        if self._waiting >= self._most_waiting:
            raise Busy(f"{self._waiting} requests like this are waiting already")
        self._waiting += 1
        try:
            async with asyncio.timeout(self._wait_s):
                await self._places.acquire()
        except TimeoutError:
            raise Busy(f"the requests before this one took longer than {self._wait_s:g} s") from None
        finally:
            self._waiting -= 1


def _tell(loop: asyncio.AbstractEventLoop, done: Callable[[T | None], None], result: T | None) -> None:
    try:
        loop.call_soon_threadsafe(done, result)
    except RuntimeError:  # it was closed in this moment: nobody waits any more
        pass
