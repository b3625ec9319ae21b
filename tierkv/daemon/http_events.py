"""``/v1/events``: what happens in the store, as server-sent events, for the page and for schedulers.

Each message is one of these; its id is the number of the last event in it, to go on from:

    id: 812
    event: blocks
    data: [{"seq": 811, "at": 1764..., "kind": "arrived", "tier": "nvme", ...}, ...]

    id: 900
    event: gap
    data: {"missed": 88}

A listener that is slower than the store loses the oldest events and is told how many; it never stalls anybody. Who asks
for all that is kept gets it in many messages, so that others have their turn between them and little waits in memory.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

from aiohttp import web

from tierkv.clock import Clock
from tierkv.daemon.http_work import Busy
from tierkv.daemon.questions import QuestionError
from tierkv.events import MOST_EVENTS, Event, EventLog

LOOK_S: Final = 0.2
"""So often it is looked whether something happened."""
STILL_S: Final = 10.0
"""After so long without an event an empty line shows that the connection lives."""
WRITE_S: Final = 10.0
"""So long a listener may take to accept what it is sent."""
MOST_LISTENERS: Final = 16
MOST_IN_ONE: Final = 256
"""Events of one message."""


class EventStream:
    """Made and used in the event loop's thread."""

    def __init__(self, events: EventLog, clock: Clock) -> None:
        self._events = events
        self._clock = clock
        self._listeners = 0
        self._closed = asyncio.Event()

    def close(self) -> None:
        """All streams end."""
        self._closed.set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Raises ``QuestionError`` and ``Busy``."""
        # A browser that connects again does so with the first address, so what it heard last goes before `after`.
        heard = request.headers.get("Last-Event-ID") or request.query.get("after")
        after = _number("after", heard, self._events.last)
        most = max(1, _number("most", request.query.get("most"), MOST_EVENTS))
        if self._listeners >= MOST_LISTENERS:
            raise Busy(f"{MOST_LISTENERS} listen already")
        headers = {
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",
        }
        response = web.StreamResponse(headers=headers)
        self._listeners += 1
        try:
            await response.prepare(request)
            await self._tell(request, response, min(after, self._events.last), most)
        except (ConnectionError, TimeoutError):  # it has left, or takes nothing
            response.force_close()
        finally:
            self._listeners -= 1
        return response

    async def _tell(self, request: web.Request, response: web.StreamResponse, after: int, most: int) -> None:
        still_s = 0.0
        await _write(response, b": these are the store's events\n\n")
        while not self._closed.is_set() and request.transport is not None:
            if self._events.last > after:
                still_s = 0.0
                after = await self._catch_up(response, after, most)
            elif still_s >= STILL_S:
                still_s = 0.0
                await _write(response, b":\n\n")
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._closed.wait()
            except TimeoutError:
                still_s += LOOK_S

    async def _catch_up(self, response: web.StreamResponse, after: int, most: int) -> int:
        """Tells what happened until now; gives the number of the last event that it told."""
        now = self._events.last
        start = max(after, now - most)
        while start < now and not self._closed.is_set():
            found = self._events.since(start, min(MOST_IN_ONE, now - start))
            if not found:
                break
            missed = found[0].seq - after - 1
            after = start = found[-1].seq
            await _write(response, self._messages(found, missed))
            await asyncio.sleep(0)
        return after

    def _messages(self, found: Sequence[Event], missed: int) -> bytes:
        text = ""
        if missed:
            text = _message(found[0].seq - 1, "gap", {"missed": missed})
        ahead_s = self._clock.unix_s() - self._clock.now_s()
        return (
            text + _message(found[-1].seq, "blocks", [_plain(event, ahead_s) for event in found])
        ).encode()


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(WRITE_S):
        await response.write(data)


def _message(number: int, name: str, data: object) -> str:
    return f"id: {number}\nevent: {name}\ndata: {json.dumps(data)}\n\n"


def _plain(event: Event, ahead_s: float) -> dict[str, Any]:
    return {
        "seq": event.seq,
        "at": round(event.at_s + ahead_s, 3),
        "kind": event.kind,
        "namespace": event.namespace.hex(),
        "hash": None if event.block_hash is None else event.block_hash.hex(),
        "parent": None if event.parent_hash is None else event.parent_hash.hex(),
        "tier": event.tier,
        "reason": event.reason,
    }


def _number(name: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise QuestionError(f"{name} = {text[:40]!r}: a whole number is expected")
    return int(text)
