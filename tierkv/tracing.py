"""OpenTelemetry traces, as an option: ``client = traced(tierkv.open(...))``, or around what ``tierkv.connect`` gives.

The verbs that a request waits for become spans of whatever trace the caller is in: ``tierkv.match``, ``prefetch``,
``load``, ``put``, ``offload``, ``onboard``. Their attributes are numbers of blocks and tokens, tiers, and the first
digits of the namespace: no tokens, no salt, no whole hash. Only the package ``opentelemetry-api`` is used; without it,
``traced`` gives the client back as it was, and who does not call ``traced`` pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib import import_module
from types import TracebackType
from typing import Any, Final, TypeVar

from tierkv import __version__
from tierkv.aio import AsyncVerbs
from tierkv.handles import Lease
from tierkv.intake import Stored
from tierkv.keys import Chain
from tierkv.reading import Match

T = TypeVar("T")
Facts = Mapping[str, int | str | bool]

API: Final = "opentelemetry.trace"
"""``opentelemetry`` alone says nothing: packages beside the API's lie in the same folder."""
PREFIX: Final = "tierkv."
DIGITS: Final = 16
"""Of a namespace's digest: enough to find it in ``tierkv status``."""


def traced(client: Any, tracer: Any = None) -> Any:
    """A client with the same verbs that leaves spans; ``client`` itself where OpenTelemetry is not installed.

    ``tracer``: one of ``opentelemetry.trace``; by default that of the provider that the application has set.
    Thread-safe as the client is.
    """
    if tracer is None:
        try:
            tracer = import_module(API).get_tracer("tierkv", __version__)
        except ModuleNotFoundError as error:
            if error.name not in (API, API.partition(".")[0]):
                raise  # the package is there and lacks another
            return client
    return Traced(client, tracer)


class Traced:
    """All that is not named here is the client's own."""

    def __init__(self, client: Any, tracer: Any) -> None:
        self._client = client
        self._tracer = tracer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def __enter__(self) -> Traced:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    @property
    def aio(self) -> AsyncVerbs:
        return AsyncVerbs(self)

    # -- verbs that answer when they return -----------------------------------------------------------------------

    def match(self, chain: Chain, **options: Any) -> Match:
        found: Match = self._call("match", chain, lambda: self._client.match(chain, **options), _of_match)
        return found

    def load(self, chain: Chain, **options: Any) -> Lease:
        lease: Lease = self._call("load", chain, lambda: self._client.load(chain, **options), _of_lease)
        return lease

    def put(self, chain: Chain, *words: Any, **options: Any) -> Stored:
        stored: Stored = self._call(
            "put", chain, lambda: self._client.put(chain, *words, **options), _of_stored
        )
        return stored

    # -- verbs that answer later ----------------------------------------------------------------------------------

    def prefetch(self, chain: Chain, **options: Any) -> Future[Match]:
        return self._begin("prefetch", chain, lambda: self._client.prefetch(chain, **options), _of_match)

    def load_async(self, chain: Chain, **options: Any) -> Future[Lease]:
        return self._begin("load", chain, lambda: self._client.load_async(chain, **options), _of_lease)

    def offload(self, kv: Any, pages: Any, chain: Chain, **options: Any) -> Future[Stored]:
        return self._begin(
            "offload", chain, lambda: self._client.offload(kv, pages, chain, **options), _of_stored
        )

    def onboard(self, lease: Lease, kv: Any, pages: Any, **options: Any) -> Future[bool]:
        return self._begin(
            "onboard", lease.chain, lambda: self._client.onboard(lease, kv, pages, **options), _of_copy
        )

    # -- spans ----------------------------------------------------------------------------------------------------

    def _call(self, name: str, chain: Chain, work: Callable[[], T], facts: Callable[[T], Facts]) -> T:
        with self._tracer.start_as_current_span(PREFIX + name, attributes=_of_chain(chain)) as span:
            result = work()
            span.set_attributes(facts(result))
            return result

    def _begin(
        self, name: str, chain: Chain, work: Callable[[], Future[T]], facts: Callable[[T], Facts]
    ) -> Future[T]:
        span = self._tracer.start_span(PREFIX + name, attributes=_of_chain(chain))
        begun = False
        try:
            future = work()
            begun = True
        finally:
            if not begun:  # it raised at once: nothing will end later
                span.end()

        def over(done: Future[T]) -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None:
                span.record_exception(error)
            elif not done.cancelled():
                span.set_attributes(facts(done.result()))
            span.end()

        future.add_done_callback(over)
        return future


def _of_chain(chain: Chain) -> Facts:
    return {
        "tierkv.namespace": chain.namespace.digest.hex()[:DIGITS],
        "tierkv.blocks": len(chain),
        "tierkv.prompt_tokens": chain.num_tokens,
    }


def _of_match(found: Match) -> Facts:
    tiers = {f"tierkv.found_in.{tier}": count for tier, count in found.tiers.items()}
    return {"tierkv.found_blocks": found.blocks, "tierkv.found_tokens": found.tokens, **tiers}


def _of_lease(lease: Lease) -> Facts:
    return {"tierkv.found_blocks": len(lease), "tierkv.found_tokens": lease.tokens}


def _of_stored(stored: Stored) -> Facts:
    dropped = {f"tierkv.dropped.{reason}": count for reason, count in stored.dropped.items()}
    return {"tierkv.stored_blocks": stored.stored, **dropped}


def _of_copy(whole: bool) -> Facts:
    return {"tierkv.whole": whole}
