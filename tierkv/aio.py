"""``client.aio``: the verbs that take time, as coroutines."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from tierkv.clearing import ClearReport
from tierkv.copier import PagedKV
from tierkv.filling import Payload
from tierkv.flush import FlushReport
from tierkv.handles import Lease
from tierkv.intake import Stored
from tierkv.keys import Chain
from tierkv.reading import Match
from tierkv.watching import Announcement, Watched

T = TypeVar("T")


class AsyncVerbs:
    """``await client.aio.load(chain)``: the same verbs for asyncio. The work is done by other threads.

    ``client`` is anything with the verbs of ``Client``."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def prefetch(self, chain: Chain, **options: Any) -> Match:
        return await _awaited(self._client.prefetch(chain, **options))

    async def load(self, chain: Chain, **options: Any) -> Lease:
        return await _awaited(self._client.load_async(chain, **options))

    async def put(self, chain: Chain, payloads: Sequence[Payload], **options: Any) -> Stored:
        import asyncio

        return await asyncio.to_thread(partial(self._client.put, chain, payloads, **options))

    async def offload(self, kv: PagedKV, pages: Any, chain: Chain, **options: Any) -> Stored:
        return await _awaited(self._client.offload(kv, pages, chain, **options))

    async def onboard(self, lease: Lease, kv: PagedKV, pages: Any, **options: Any) -> bool:
        return await _awaited(self._client.onboard(lease, kv, pages, **options))

    async def announce(self, chain: Chain, **options: Any) -> Announcement:
        import asyncio

        return await asyncio.to_thread(partial(self._client.announce, chain, **options))

    async def watch(self, chain: Chain, **options: Any) -> Watched:
        import asyncio

        return await _awaited(await asyncio.to_thread(partial(self._client.watch, chain, **options)))

    async def flush(self, tier: str, **options: Any) -> FlushReport:
        return await _awaited(self._client.flush(tier, **options))

    async def clear(self, **options: Any) -> ClearReport:
        return await _awaited(self._client.clear(**options))


async def _awaited(future: Future[T]) -> T:
    import asyncio

    return await asyncio.wrap_future(future)
