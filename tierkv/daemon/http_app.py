"""What the HTTP face answers: its paths, who may ask, how long a question may be, how errors are told.

Errors are ``{"error": {"kind": ..., "message": ...}}``. Where a token is set, everything needs it but ``/healthz``
and the files of the page.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

from aiohttp import web

from tierkv.daemon.exposition import CONTENT_TYPE, Exposition
from tierkv.daemon.http_events import EventStream
from tierkv.daemon.http_page import Page
from tierkv.daemon.http_work import Bodies, Busy, Workers
from tierkv.daemon.openapi import description
from tierkv.daemon.operator import QUESTIONS, Operator
from tierkv.daemon.questions import NotThere, QuestionError
from tierkv.errors import (
    ArgumentError,
    ClosedError,
    ConfigError,
    IdentityError,
    LayoutError,
    TierKVError,
)
from tierkv.logs import RareLog

ALIVE: Final = "/healthz"
BODY_S: Final = 10.0
"""So long the rest of a request may take once its head is here."""
QUICK, QUICK_WAITING, SLOW, SLOW_WAITING = 4, 64, 16, 64
MOST_BODY_BYTES: Final = 2 * max(question.most_bytes for question in QUESTIONS.values())
"""For the bodies of all requests together, until they are answered."""
WAIT_S: Final = 10.0
"""So long a request waits for its turn."""

ON_ALL: Final = {"Server": "tierkv", "X-Content-Type-Options": "nosniff"}
"""Headers of each answer: which Python and which library answer is nobody's business, and what a request said is never
taken for a page."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS: Mapping[type[BaseException], tuple[int, str]] = {
    QuestionError: (400, "bad_question"),
    NotThere: (404, "not_found"),
    ArgumentError: (400, "bad_argument"),
    ConfigError: (400, "bad_value"),
    IdentityError: (400, "bad_identity"),
    LayoutError: (400, "bad_layout"),
    ClosedError: (503, "closed"),
    TimeoutError: (504, "timeout"),
    TierKVError: (500, "failed"),
}
"""By the first class that fits."""


class Answer(NamedTuple):
    status: int
    body: bytes
    content_type: str = "application/json"


def error_answer(status: int, kind: str, message: str, **more: object) -> Answer:
    return Answer(status, json.dumps({"error": {"kind": kind, "message": message, **more}}).encode())


def _of(error: TierKVError | TimeoutError) -> Answer:
    status, kind = next(told for its, told in _STATUS.items() if isinstance(error, its))
    if isinstance(error, ConfigError):
        return error_answer(status, kind, str(error), key=error.key, hint=error.hint)
    return error_answer(status, kind, str(error) or "it took too long")


class HttpApp:
    """Made in the event loop's thread."""

    def __init__(self, operator: Operator, exposition: Exposition, token: str | None, rare: RareLog) -> None:
        self._operator = operator
        self._exposition = exposition
        self._token = None if token is None else token.encode()
        self._rare = rare
        self._quick = Workers[Answer]("tierkv-http-quick", QUICK, QUICK_WAITING, WAIT_S)
        self._slow = Workers[Answer]("tierkv-http-slow", SLOW, SLOW_WAITING, WAIT_S)
        self._bodies = Bodies(MOST_BODY_BYTES)
        self.events = EventStream(operator.store.events, operator.store.clock)
        self._page = Page(needs_token=token is not None)
        self._open = self._page.paths | {ALIVE}
        self.under_way = 0
        """Requests that are being answered."""
        self.on_request: Callable[[web.Request, int], None] = lambda request, change: None
        """Told of each request when it begins (1) and when it ends (-1)."""

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(ALIVE, self._alive)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/openapi.json", self._described)
        app.router.add_get("/v1/events", self.events.handle)
        self._page.add_to(app)
        for name in QUESTIONS:
            add = app.router.add_get if name == "status" else app.router.add_post
            add(f"/v1/{name}", self._asks(name))
        app.on_response_prepare.append(_anonymous)
        return app

    # -- around every request -------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.under_way += 1
        self.on_request(request, 1)
        try:
            if _asked_by_another_page(request):
                return _response(
                    error_answer(403, "other_origin", "a page of another host asks this"), close=True
                )
            if request.path not in self._open and not self._may(request):
                self._rare.warning("http-token", "HTTP: a request from %s has no valid token", request.remote)
                if "Authorization" in request.headers:
                    answer = error_answer(
                        401, "wrong_token", "the token is not the daemon's (sidecar.token_file)"
                    )
                else:
                    answer = error_answer(
                        401, "no_token", "this needs the header 'Authorization: Bearer TOKEN'"
                    )
                return _response(answer, {"WWW-Authenticate": 'Bearer realm="tierkv"'})
            return await handler(request)
        except web.HTTPException as error:  # of the router: no such path, no such method
            return _response(
                error_answer(error.status, _word(error.reason), _sentence(request, error)), _allow(error)
            )
        except QuestionError as error:
            return _response(_of(error))
        except Busy as error:
            left = not request.content.at_eof()  # of its body, which nobody wants any more
            return _response(error_answer(503, "busy", str(error)), {"Retry-After": "1"}, close=left)
        finally:
            self.under_way -= 1
            self.on_request(request, -1)

    def _may(self, request: web.Request) -> bool:
        if self._token is None:
            return True
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip().encode(errors="surrogateescape")
        return hmac.compare_digest(given, self._token) and scheme.lower() == "bearer"

    # -- the paths ------------------------------------------------------------------------------------------------

    async def _alive(self, request: web.Request) -> web.Response:
        return _response(Answer(200, b'{"alive": true}'))

    async def _readyz(self, request: web.Request) -> web.Response:
        return await self._answered(self._quick, self._ready)

    async def _metrics(self, request: web.Request) -> web.Response:
        return await self._answered(self._quick, lambda: Answer(200, self._exposition.text(), CONTENT_TYPE))

    async def _described(self, request: web.Request) -> web.Response:
        return _response(Answer(200, json.dumps(description()).encode()))

    def _asks(self, name: str) -> Handler:
        question = QUESTIONS[name]
        workers = self._slow if question.slow else self._quick

        async def handle(request: web.Request) -> web.StreamResponse:
            with self._bodies.one() as take:
                body = await _body_of(request, question.most_bytes, take)
                if isinstance(body, Answer):
                    return _response(body, close=True)
                return await self._answered(workers, lambda: self._ask(name, body))

        return handle

    async def _answered(self, workers: Workers[Answer], work: Callable[[], Answer]) -> web.Response:
        answer = await workers.run(work)
        if answer is None:
            answer = error_answer(500, "internal", "this failed in a way that nobody thought of; see the log")
        return _response(answer)

    # -- in other threads -----------------------------------------------------------------------------------------

    def _ready(self) -> Answer:
        health = self._operator.store.health()
        reasons = [reason._asdict() for reason in health.reasons]
        words = {"ready": health.ready, "state": health.state, "reasons": reasons}
        return Answer(200 if health.ready else 503, json.dumps(words).encode())

    def _ask(self, name: str, body: bytes) -> Answer:
        try:
            return Answer(200, json.dumps(self._operator.ask(name, body)).encode())
        except (TierKVError, TimeoutError) as error:
            return _of(error)


def _asked_by_another_page(request: web.Request) -> bool:
    """A browser lets any page send a POST anywhere, as text. Where no token is needed, on a unix socket that somebody
    has forwarded to a port, such a page could clear the store."""
    if request.method in ("GET", "HEAD"):
        return False
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site is not None:
        return site not in ("same-origin", "none")
    return origin is not None and origin.partition("://")[2] != request.headers.get("Host")


async def _body_of(request: web.Request, most_bytes: int, take: Callable[[int], None]) -> bytes | Answer:
    """The body, or what is wrong with it. ``take`` takes memory for it, and may raise ``Busy``."""
    too_long = error_answer(413, "too_long", f"the body of this request may have {most_bytes} bytes")
    if (request.content_length or 0) > most_bytes:
        return too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.content.iter_any():
                if len(body) + len(chunk) > most_bytes:
                    return too_long
                take(len(chunk))
                body += chunk
    except TimeoutError:
        return error_answer(408, "too_slow", f"the body of the request was not here after {BODY_S:g} s")
    except web.RequestPayloadError as error:  # it is compressed or cut in a way that cannot be read
        return error_answer(400, "bad_body", f"the body cannot be read: {error}")
    return bytes(body)


def _response(
    answer: Answer, headers: Mapping[str, str] | None = None, *, close: bool = False
) -> web.Response:
    kind = {"Content-Type": answer.content_type, "Cache-Control": "no-store", **(headers or {})}
    response = web.Response(status=answer.status, body=answer.body, headers=kind)
    if close:
        response.force_close()
    return response


async def _anonymous(request: web.Request, response: Any) -> None:
    response.headers.update(ON_ALL)


def _word(reason: str) -> str:
    return reason.lower().replace(" ", "_")


def _sentence(request: web.Request, error: web.HTTPException) -> str:
    path = request.path[:200]
    if isinstance(error, web.HTTPNotFound):
        return f"there is no path {path!r}: /v1/openapi.json has all that there are"
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{path!r} does not take {error.method} but {' or '.join(sorted(error.allowed_methods))}"
    return error.reason


def _allow(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
