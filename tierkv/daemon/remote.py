"""The client of a store in another process: the verbs of ``tierkv.client.Client`` over a daemon's socket.

Blocks do not cross the socket: the daemon's arena is mapped, and this process copies its own bytes. When the daemon is
away, a load is a miss and a store is dropped, at once or within the call's deadline; the link comes back on its own.
Verbs that neither load nor store (``flush``, ``evict``, ``clear``, ``stats`` ...) raise ``Away`` then, since nothing
else would be true.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from typing import Any, TypeVar

from tierkv.aio import AsyncVerbs
from tierkv.any_copier import AnyCopier
from tierkv.arguments import checked
from tierkv.clearing import ClearReport, Evicted
from tierkv.copier import PagedKV, ReadyEvent
from tierkv.daemon.explained import hear_explanation
from tierkv.daemon.link import Link
from tierkv.daemon.remote_calls import CALL_S, SLOW_CALL_S, named_by
from tierkv.daemon.remote_handles import Nowhere, RemoteRun
from tierkv.daemon.remote_pages import PageCopies
from tierkv.daemon.remote_storing import RemoteStoring
from tierkv.daemon.remote_watching import RemoteWatching
from tierkv.daemon.replies import heard
from tierkv.daemon.tenant import Tenant
from tierkv.daemon.words import hear_event, say_chain, say_retention, say_seconds, take
from tierkv.errors import Away, IdentityError
from tierkv.events import Event
from tierkv.explanation import Explanation
from tierkv.flush import FlushReport
from tierkv.handles import Lease, Sealed
from tierkv.health import Health, Reason
from tierkv.intake import Stored
from tierkv.keys import Chain, Namespace, chain_of_blocks
from tierkv.namespaces import OpenNamespace
from tierkv.paging import Pages
from tierkv.reading import Match
from tierkv.retention import KEEP, Retention, check_ttl
from tierkv.tier import ClearResult
from tierkv.watching import DEFAULT_S, Announcement, Watched

T = TypeVar("T")


CLOSE_S = 1.0
"""So long a close waits for those who are writing into slots."""


@checked
class RemoteClient(RemoteStoring):
    """Made by ``tierkv.connect``. Any thread; ``ForkError`` in a forked child, ``ClosedError`` after ``close``."""

    def __init__(
        self, path: str, *, owner: str = "client", call_s: float = CALL_S, tenant: Tenant | None = None
    ) -> None:
        """``call_s``: so long a verb that the daemon answers from memory waits for it."""
        tenant = tenant or Tenant()
        super().__init__(Link(path, owner, tenant.words()), call_s, tenant)
        self._owner = owner
        self.copier = AnyCopier(self._executor, lambda: self.link.memory)
        self.link.met = self.copier.renew
        self._pages = PageCopies(self.copier)
        self._watching = RemoteWatching(self, self._executor)

    # -- finding --------------------------------------------------------------------------------------------------

    def match(self, chain: Chain, *, local_computed: int = 0) -> Match:
        self._opened(chain)
        words = {**say_chain(chain), "local": local_computed}
        return self._match("match", chain, words, self._soon_s())

    def _match(self, verb: str, chain: Chain, words: dict[str, Any], by_s: float) -> Match:
        try:
            found = self._ask(verb, chain.namespace, words, by_s)
            return heard(lambda its: Match(chain, its["blocks"], its["tokens"], its["tiers"]), found)
        except Away:
            return Match(chain, 0, 0, {})

    def prefetch(
        self,
        chain: Chain,
        *,
        timeout_s: float | None = None,
        local_computed: int = 0,
        retention: Retention | None = None,
    ) -> Future[Match]:
        self._opened(chain)
        words = {**_load_words(chain, timeout_s, retention), "local": local_computed}
        by_s = self._by_s(timeout_s)
        return self._background.run(
            lambda: self._match("prefetch", chain, words, by_s), lambda: Match(chain, 0, 0, {})
        )

    def load_async(
        self,
        chain: Chain,
        *,
        timeout_s: float | None = None,
        owner: str | None = None,
        retention: Retention | None = None,
    ) -> Future[Lease]:
        self._opened(chain)
        words, by_s = _load_words(chain, timeout_s, retention), self._by_s(timeout_s)
        return self._background.run(
            lambda: self._load(chain, words, owner or self._owner, by_s),
            lambda: _nothing(chain),
            Lease.release,
        )

    def load(
        self,
        chain: Chain,
        *,
        timeout_s: float | None = None,
        owner: str | None = None,
        retention: Retention | None = None,
    ) -> Lease:
        self._opened(chain)
        words = _load_words(chain, timeout_s, retention)
        return self._load(chain, words, owner or self._owner, self._by_s(timeout_s))

    def _load(self, chain: Chain, words: dict[str, Any], owner: str, by_s: float) -> Lease:
        number = next(self._numbers)
        parts = len(chain.namespace.layout.parts)
        try:
            with self._or_give_up("release", {"lease": number}):
                reply = self._ask("load", chain.namespace, {**words, "lease": number, "owner": owner}, by_s)
                run = heard(lambda its: self._run(number, parts, its), reply)
        except Away:
            return _nothing(chain)
        if run is None:
            return _nothing(chain)
        lease = run.lease(chain, owner, self.clock.now_s() + self.link.lease_s)
        lease.colder = reply.get("colder", {})
        return lease

    def _run(self, number: int, parts: int, found: dict[str, Any]) -> RemoteRun | None:
        return RemoteRun(self.link, found["arena"], number, parts, found) if found["blocks"] else None

    def explain(
        self,
        chain: Chain | None = None,
        *,
        namespace: Namespace | OpenNamespace | None = None,
        hashes: Sequence[bytes | str] = (),
    ) -> Explanation:
        """See ``Client.explain``. Raises ``Away``."""
        if chain is None:
            if namespace is None:
                raise IdentityError("explain needs a chain, or block hashes and their namespace")
            chain = chain_of_blocks(named_by(namespace), hashes)
        self._opened(chain)
        by_s = time.monotonic() + SLOW_CALL_S
        return heard(hear_explanation, self._ask("explain", chain.namespace, say_chain(chain), by_s))

    # -- telling others -------------------------------------------------------------------------------------------

    def announce(
        self, chain: Chain, *, first: int = 0, count: int | None = None, timeout_s: float = DEFAULT_S
    ) -> Announcement:
        self._opened(chain)
        last = len(chain) if count is None else first + count
        return self._watching.announce(chain, range(first, last), timeout_s)

    def watch(
        self, chain: Chain, *, count: int | None = None, grace_s: float = 0.0, timeout_s: float = DEFAULT_S
    ) -> Future[Watched]:
        """See ``Client.watch``. When the daemon goes away it ends as ``abandoned``."""
        self._opened(chain)
        return self._watching.watch(chain, len(chain) if count is None else count, grace_s, timeout_s)

    # -- engines' paged memory ------------------------------------------------------------------------------------

    def offload(
        self,
        kv: PagedKV,
        pages: Pages,
        chain: Chain,
        *,
        first: int = 0,
        rank: int = 0,
        absent: Sequence[int] = (),
        ready: ReadyEvent | None = None,
        retention: Retention = KEEP,
    ) -> Future[Stored]:
        self._opened(chain)
        self._pages.check(kv, chain)
        result = Stored()
        options: dict[str, Any] = {"absent": absent, "retention": retention, "result": result}
        draft = self.reserve(chain, first=first, count=len(pages), rank=rank, **options)

        def commit(sealed: Sealed) -> None:
            self.commit(sealed, chain, **options)

        return self._pages.offload(kv, pages, first, draft, ready, result, commit)

    def onboard(
        self,
        lease: Lease,
        kv: PagedKV,
        pages: Pages,
        *,
        rank: int = 0,
        skip: int = 0,
        on_layer: Callable[[int, int], None] | None = None,
    ) -> Future[bool]:
        opened = self._opened(lease.chain)
        self._pages.check(kv, lease.chain)
        return self._pages.onboard(lease, kv, pages, opened.parts_of(rank), skip, on_layer)

    # -- keeping and taking out -----------------------------------------------------------------------------------

    def pin(
        self,
        chain: Chain,
        *,
        timeout_s: float | None = None,
        ttl_s: float | None = None,
        owner: str | None = None,
    ) -> int:
        self._opened(chain)
        if ttl_s is not None:
            check_ttl(ttl_s)
        time_s = None if timeout_s is None else say_seconds(timeout_s)
        words = {**say_chain(chain), "timeout_s": time_s, "ttl_s": ttl_s, "owner": owner or self._owner}
        try:
            return heard(_blocks, self._ask("pin", chain.namespace, words, self._by_s(timeout_s)))
        except Away:
            return 0

    def unpin(self, chain: Chain) -> int:
        self._opened(chain)
        try:
            return heard(_blocks, self._ask("unpin", chain.namespace, say_chain(chain), self._soon_s()))
        except Away:
            return 0

    def flush(self, tier: str, *, timeout_s: float = 30.0) -> Future[FlushReport]:
        words = {"tier": tier, "timeout_s": say_seconds(timeout_s)}
        return self._begin("flush", None, words, timeout_s, lambda found: _of_kind(FlushReport, found))

    def evict(
        self, tier: str, *, namespace: Namespace | OpenNamespace | None = None, timeout_s: float = 30.0
    ) -> Evicted:
        named = None if namespace is None else named_by(namespace)
        words = {"tier": tier, "timeout_s": say_seconds(timeout_s)}
        found = self._about("evict", named, words, self._by_s(timeout_s) + CALL_S)
        return heard(lambda its: _of_kind(Evicted, its), found)

    def clear(
        self,
        *,
        namespace: Namespace | OpenNamespace | None = None,
        tenant_salt: str | None = None,
        timeout_s: float = 30.0,
    ) -> Future[ClearReport]:
        """See ``Client.clear``. While the daemon is away the future raises ``Away``: nothing was cleared."""
        if namespace is not None and tenant_salt is not None:
            raise IdentityError("give a namespace or a tenant's salt, not both")
        named = None if namespace is None else named_by(namespace)
        words = {"salt": tenant_salt, "timeout_s": say_seconds(timeout_s)}
        return self._begin("clear", named, words, timeout_s, _hear_clear)

    def bump_epoch(
        self, namespace: Namespace | OpenNamespace, *, timeout_s: float = 30.0
    ) -> tuple[OpenNamespace, Future[ClearReport]]:
        named = named_by(namespace)
        known = self._spaces.get(named.digest)
        cleared = self.clear(namespace=named, timeout_s=timeout_s)
        spec = replace(named.spec, weights_epoch=named.spec.weights_epoch + 1)
        return self.open_namespace(spec, ranks=known[0].ranks if known is not None else None), cleared

    def sleep(self, *, keep: bool, timeout_s: float = 30.0) -> Future[Evicted]:
        words = {"keep": keep, "timeout_s": say_seconds(timeout_s)}
        return self._begin("sleep", None, words, timeout_s, lambda found: _of_kind(Evicted, found))

    def wake(self) -> None:
        self.link.call("wake", {}, self._soon_s())

    # -- facts and life -------------------------------------------------------------------------------------------

    def report_prefill(self, tokens: int, seconds: float) -> None:
        try:
            self.link.call("report_prefill", {"tokens": tokens, "seconds": seconds}, self._soon_s())
        except Away:
            pass

    def stats(self) -> dict[str, object]:
        """The daemon's. Raises ``Away``."""
        return heard(lambda its: take(its, "stats", dict), self.link.call("stats", {}, self._soon_s()))

    def health(self) -> Health:
        try:
            return heard(_hear_health, self.link.call("health", {}, self._soon_s()))
        except Away as error:
            return Health("unhealthy", False, (Reason("daemon", "unhealthy", str(error)),))

    def events(self, after: int = 0, *, timeout_s: float = 0.0) -> list[Event]:
        """See ``Client.events``. Raises ``Away``."""
        words = {"after": after, "timeout_s": say_seconds(timeout_s)}
        by_s = self._soon_s() + say_seconds(timeout_s)
        found = self.link.call("events", words, by_s)
        return heard(lambda its: [hear_event(one) for one in its["events"]], found)

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the session; the daemon takes back what it held, but for drafts that somebody still holds: they may be
        written. Calls that wait are over at once, with a miss. Harmless the second time, and in a forked child."""
        if self.link.is_here():
            timeout_s = CLOSE_S if timeout_s is None else timeout_s
            self.link.refuse()
            self.copier.close(timeout_s)
            self._executor.close(timeout_s)  # copies end before their slots do
            self._drafts.wait(timeout_s)
        self.link.close(self._drafts.writing())

    @property
    def aio(self) -> AsyncVerbs:
        return AsyncVerbs(self)

    def __enter__(self) -> RemoteClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nothing(chain: Chain) -> Lease:
    return Lease(Nowhere(), chain, [], "nobody", float("inf"))


def _load_words(chain: Chain, timeout_s: float | None, retention: Retention | None) -> dict[str, Any]:
    said = None if retention is None else say_retention(retention)
    time_s = None if timeout_s is None else say_seconds(timeout_s)
    return {**say_chain(chain), "timeout_s": time_s, "retention": said}


def _of_kind(kind: type[T], found: dict[str, Any]) -> T:
    """A result made of those words of a reply that belong to it."""
    return kind(**{one.name: found[one.name] for one in fields(kind)})  # type: ignore[arg-type]


def _blocks(found: dict[str, Any]) -> int:
    return take(found, "blocks", int)


def _hear_health(found: dict[str, Any]) -> Health:
    return Health(found["state"], found["ready"], tuple(Reason(*reason) for reason in found["reasons"]))


def _hear_clear(found: dict[str, Any]) -> ClearReport:
    tiers = {name: {**its, "kept": tuple(its["kept"])} for name, its in found["tiers"].items()}
    return ClearReport({name: ClearResult(**its) for name, its in tiers.items()})
