"""``client.aio``: the verbs that take time, as coroutines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from tierkv.clearing import ClearReport
from tierkv.copier import PagedKV
from tierkv.executor import abandon, deliver
from tierkv.filling import Payload
from tierkv.flush import FlushReport
from tierkv.handles import Lease
from tierkv.intake import Stored
from tierkv.keys import Chain
from tierkv.reading import Match
from tierkv.supervision import Caught
from tierkv.watching import Announcement, Watched

T = TypeVar("T")


class AsyncVerbs:
    """``await client.aio.load(chain)``: the same verbs for asyncio. The work is done by other threads.

    A coroutine that is cancelled keeps nothing: a lease that comes too late is released, an announcement ended.
    ``client`` is anything with the verbs of ``Client``."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def prefetch(self, chain: Chain, **options: Any) -> Match:
        return await _awaited(self._client.prefetch(chain, **options))

    async def load(self, chain: Chain, **options: Any) -> Lease:
        return await _awaited(self._client.load_async(chain, **options), Lease.release)

    async def put(self, chain: Chain, payloads: Sequence[Payload], **options: Any) -> Stored:
        import asyncio

        return await asyncio.to_thread(partial(self._client.put, chain, payloads, **options))

    async def offload(self, kv: PagedKV, pages: Any, chain: Chain, **options: Any) -> Stored:
        return await _awaited(self._client.offload(kv, pages, chain, **options))

    async def onboard(self, lease: Lease, kv: PagedKV, pages: Any, **options: Any) -> bool:
        return await _awaited(self._client.onboard(lease, kv, pages, **options))

    async def announce(self, chain: Chain, **options: Any) -> Announcement:
        return await _elsewhere(partial(self._client.announce, chain, **options), lambda one: one.cancel())

    async def watch(self, chain: Chain, **options: Any) -> Watched:
        begin = partial(self._client.watch, chain, **options)
        return await _awaited(await _elsewhere(begin, lambda future: future.cancel()))

    async def flush(self, tier: str, **options: Any) -> FlushReport:
        return await _awaited(self._client.flush(tier, **options))

    async def clear(self, **options: Any) -> ClearReport:
        return await _awaited(self._client.clear(**options))


def _nothing(_: object) -> None:
    """What holds nothing needs not be given back."""


async def _awaited(future: Future[T], give_back: Callable[[T], object] = _nothing) -> T:
    """The result; who is cancelled meanwhile does not want it any more, even if it is there already."""
    import asyncio

    whole = False
    try:
        result = await asyncio.wrap_future(future)
        whole = True
    finally:
        if not whole:
            abandon(future, give_back)
    return result


async def _elsewhere(call: Callable[[], T], give_back: Callable[[T], object]) -> T:
    """The result of a call that may block, made by another thread."""
    import asyncio

    future: Future[T] = Future()

    def run() -> None:
        caught = Caught(in_generator=False)
        with caught:
            result = call()
            if not deliver(future, result):
                give_back(result)
        if caught.error is not None and future.set_running_or_notify_cancel():
            future.set_exception(caught.error)

    asyncio.get_running_loop().run_in_executor(None, copy_context().run, run)
    return await _awaited(future, give_back)
