"""The HTTP face: one thread with an event loop, the only one in tierkv, on a unix socket or on TCP.

For people, probes and Prometheus; engines use the daemon's own socket. A connection that asks nothing, or not to the
end, is closed after ``QUIET_S``; at most ``MOST_CONNECTIONS`` are open. Beyond that the one that has been quiet longest
makes way: who only connects, without a token, keeps no probe out.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.http import HttpProcessingError

from tierkv.clock import Clock
from tierkv.config_sidecar import SidecarConfig, http_address
from tierkv.daemon.exposition import Exposition, Sessions
from tierkv.daemon.http_app import ON_ALL, HttpApp, error_answer
from tierkv.daemon.listening import listen_tcp, listen_unix, lock_name, unlock_name
from tierkv.daemon.operator import Operator
from tierkv.errors import ConfigError
from tierkv.logs import RareLog

MOST_CONNECTIONS: Final = 128
QUIET_S: Final = 30.0
LOOK_S: Final = 2.0
START_S: Final = 10.0
STOP_S: Final = 1.0
"""So long requests that are being answered have when the daemon stops."""

KEY: Final = "sidecar.http"


class HttpFace:
    """``start`` and ``close`` from any thread, once each. ``start`` raises ``ConfigError`` or ``AddressInUse``."""

    def __init__(
        self, operator: Operator, sessions: Sessions, config: SidecarConfig, token: str | None, clock: Clock
    ) -> None:
        self._operator = operator
        self._sessions = sessions
        self._config = config
        self._token = token
        self._rare = RareLog(clock)
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tierkv-http", daemon=True)
        self._lock_fd: int | None = None
        self._path: Path | None = None
        self.app: HttpApp | None = None
        self.address = ""
        """Where it listens, for people: with the port that was chosen where the configuration says 0."""

    def start(self) -> None:
        self._listener = self._listen()
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        if not self._started.wait(START_S):
            raise ConfigError(KEY, self._config.http, f"it does not answer after {START_S:g} s")

    def close(self) -> None:
        """Returns when the thread has ended, after ``STOP_S`` or a little more."""
        if self._thread.ident is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(STOP_S + 2.0)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            if self._lock_fd is not None:
                unlock_name(self._path, self._lock_fd)
                self._lock_fd = None

    def requests(self) -> int:
        return self.app.under_way if self.app is not None else 0

    def _listen(self) -> socket.socket:
        assert self._config.http is not None, "there is no HTTP face"
        place = http_address(self._config.http)
        if isinstance(place, Path):
            self._lock_fd = lock_name(place, KEY)
            listening = False
            try:
                listener = listen_unix(place, KEY, self._config.mode, self._config.group)
                listening = True
            finally:
                if not listening:
                    unlock_name(place, self._lock_fd)
                    self._lock_fd = None
            self._path, self.address = place, f"unix://{place}"
            return listener
        if self._token is None:
            raise ConfigError(KEY, self._config.http, "on TCP it needs a token")
        listener = listen_tcp(*place, KEY)
        host, port = listener.getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return listener

    # -- the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        exposition = Exposition(self._operator.store, self._sessions, self.requests)
        token = None if self._path is not None else self._token  # there the socket's mode says who may ask
        self.app = HttpApp(self._operator, exposition, token, self._rare)
        app = self.app
        runner = web.AppRunner(
            self.app.application(),
            shutdown_timeout=STOP_S,
        )
        await runner.setup()
        assert runner.server is not None
        visitors = Visitors(runner.server, self._rare)
        app.on_request = visitors.note
        server = await self._loop.create_server(visitors.admit, sock=self._listener) if self._path is None else (
            await self._loop.create_unix_server(visitors.admit, sock=self._listener)
        )  # fmt: skip
        self._started.set()
        look = asyncio.create_task(visitors.look())
        await self._stop.wait()
        look.cancel()
        app.events.close()
        server.close()
        await runner.cleanup()


class Visitor(web.RequestHandler):
    """One connection. What is no HTTP is refused like all else: in JSON, without the library's name."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs it, and raises where an answer has begun
        if status >= 500:
            answer = error_answer(
                status, "internal", "this failed in a way that nobody thought of; see the log"
            )
        else:
            answer = error_answer(
                status, "no_http", f"this is no HTTP that can be read ({type(exc).__name__})"
            )
        response = web.Response(status=status, body=answer.body, content_type=answer.content_type)
        response.headers.update(ON_ALL)
        response.force_close()
        return response


class Visitors:
    """Who is connected, and since when each has said nothing. Event loop's thread only."""

    def __init__(self, server: web.Server, rare: RareLog) -> None:
        self._server = server
        self._rare = rare
        self._logger = _logger(rare)
        self._loop = asyncio.get_running_loop()
        self._quiet_since_s: dict[web.RequestHandler, float] = {}
        """``inf`` while a request is answered."""
        self._lost = server.connection_lost
        setattr(server, "connection_lost", self._leave)  # noqa: B010 - the server has no other way to say so

    def admit(self) -> asyncio.BaseProtocol:
        if len(self._quiet_since_s) >= MOST_CONNECTIONS:
            self._rare.warning("http-crowded", "HTTP: more than %d connections at once", MOST_CONNECTIONS)
            if not self._make_room():
                return _Refusal()
        visitor = Visitor(
            self._server,
            loop=self._loop,
            access_log=None,  # type: ignore[arg-type] # none is written, as it takes from an application
            keepalive_timeout=QUIET_S,
            logger=self._logger,
        )
        self._quiet_since_s[visitor] = time.monotonic()
        return visitor

    def _make_room(self) -> bool:
        """The one that has been quiet longest goes, if all are not being answered."""
        waiting = [one for one, since_s in self._quiet_since_s.items() if since_s < float("inf")]
        if not waiting:
            return False
        longest = min(waiting, key=self._quiet_since_s.__getitem__)
        if longest.transport is None:  # it is not even connected yet
            return False
        del self._quiet_since_s[longest]
        longest.transport.abort()
        return True

    def _leave(self, visitor: web.RequestHandler, exc: BaseException | None = None) -> None:
        self._quiet_since_s.pop(visitor, None)
        self._lost(visitor, exc)

    def note(self, request: web.Request, change: int) -> None:
        if request.protocol in self._quiet_since_s:  # it may have left before its answer was there
            self._quiet_since_s[request.protocol] = float("inf") if change > 0 else time.monotonic()

    async def look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            before_s = time.monotonic() - QUIET_S
            for visitor, since_s in list(self._quiet_since_s.items()):
                if since_s < before_s and visitor.transport is not None:
                    visitor.transport.abort()


class _Refusal(asyncio.Protocol):
    """One visitor too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        transport.close()


def _logger(rare: RareLog) -> logging.Logger:
    """For what aiohttp has to say. What is no HTTP is told without its text: that shows what was sent, a token perhaps,
    and anybody can send it."""
    logger = logging.Logger("tierkv.http", logging.WARNING)

    def hand_over(record: logging.LogRecord) -> bool:
        cause = record.exc_info[1] if record.exc_info else None
        said = record.getMessage()
        if isinstance(cause, HttpProcessingError):
            rare.warning("no http", "HTTP: what came is no HTTP (%s): %s", type(cause).__name__, said)
        else:
            rare.error("http", "HTTP: %s", said, cause=cause)
        return False

    logger.addFilter(hand_over)
    return logger
