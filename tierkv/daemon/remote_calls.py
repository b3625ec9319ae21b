"""What all verbs of a remote client are made of: namespaces that are open here and there, calls with deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from tierkv.arguments import checked
from tierkv.clock import SystemClock
from tierkv.daemon.background import Background
from tierkv.daemon.link import Link, Meanwhile, NotLetIn, nothing
from tierkv.daemon.replies import NotKnown, heard
from tierkv.daemon.tenant import Tenant
from tierkv.daemon.words import ints, say_seconds, say_spec, take
from tierkv.errors import Away, ConfigError, IdentityError, LayoutError
from tierkv.index import Space
from tierkv.keys import Chain, Namespace, NamespaceSpec
from tierkv.logs import RareLog
from tierkv.namespaces import OpenNamespace

CALL_S = 2.0
"""For calls that the daemon answers from memory."""
GRACE_S = 0.5
"""Beyond the deadline of a call that the daemon waits for itself."""
SLOW_CALL_S = 30.0


@checked
class RemoteCalls:
    """Any thread."""

    def __init__(self, link: Link, call_s: float, tenant: Tenant) -> None:
        self.link = link
        self._tenant = tenant
        self._call_s = call_s
        self._spaces: dict[bytes, tuple[OpenNamespace, tuple[int, ...] | None]] = {}
        self._background = Background()
        self._log = RareLog(SystemClock())
        link.told_away = self._tell_away

    # -- names ----------------------------------------------------------------------------------------------------

    def open_namespace(self, spec: NamespaceSpec, *, ranks: Sequence[int] | None = None) -> OpenNamespace:
        """See ``Client.open_namespace``. While the daemon is away the namespace is opened here, and there as soon as it
        is needed. A namespace without a salt gets that of the client."""
        self.link.check()
        spec = self._tenant.spec(spec)
        namespace = Namespace(spec)
        wanted = None if ranks is None else tuple(ranks)
        known = self._spaces.get(namespace.digest)
        if known is not None and wanted in (None, known[0].ranks):
            return known[0]
        try:
            chosen = tuple(self._open_there(spec, wanted, self._soon_s()))
        except Away:
            chosen = tuple(range(spec.layout.ranks)) if wanted is None else wanted
        space = Space(0, namespace.digest, namespace.prefix)
        space.claim(spec.layout, chosen)
        opened = OpenNamespace(namespace, space, chosen)
        self._spaces[namespace.digest] = (opened, wanted)
        return opened

    def _open_there(self, spec: NamespaceSpec, ranks: tuple[int, ...] | None, by_s: float) -> list[int]:
        words = {"spec": say_spec(spec), "ranks": None if ranks is None else list(ranks)}
        return heard(lambda reply: ints(reply, "ranks"), self.link.call("open", words, by_s))

    def _opened(self, chain: Chain) -> OpenNamespace:
        self.link.check()
        known = self._spaces.get(chain.namespace.digest)
        if known is None:
            raise IdentityError(
                "the chain's namespace was not opened with this client; call open_namespace first"
            )
        return known[0]

    @contextmanager
    def _or_give_up(self, verb: str, words: dict[str, Any]) -> Iterator[None]:
        """Around a call whose reply would hand something out: without a reply, since none came in time or since who
        waited was interrupted, the daemon is told later that nobody wants it."""
        known = False
        try:
            yield
            known = True
        except Away as error:
            known = not error.asked
            raise
        finally:
            if not known:
                self.link.tell_later(verb, words)

    def _ask(
        self,
        verb: str,
        namespace: Namespace,
        words: dict[str, Any],
        by_s: float,
        meanwhile: Meanwhile = nothing,
    ) -> dict[str, Any]:
        """A call about a namespace, which is opened again where the daemon has forgotten it."""
        try:
            return self.link.call(verb, words, by_s, meanwhile)
        except NotKnown as error:
            known = self._spaces.get(namespace.digest)
            if known is None:
                raise IdentityError("the namespace was not opened with this client") from error
        try:
            self._open_there(namespace.spec, known[1], by_s)
            return self.link.call(verb, words, by_s)
        except NotKnown as error:
            raise Away(str(error)) from error
        except (ConfigError, LayoutError, IdentityError) as error:
            # It was opened before, so the caller did nothing wrong: another daemon has come that cannot take it.
            self._log.warning("reopen", "the daemon does not take a namespace that was open: %s", error)
            raise Away(str(error)) from error

    def _tell_away(self, why: Away | None) -> None:
        """A cache that is silently never there looks like one that never hits."""
        path = self.link.path
        if why is None:
            self._log.warning("back", "the daemon at %s is there again", path)
        elif isinstance(why, NotLetIn):
            self._log.warning("refused", "%s; loads are misses and nothing is stored", why)
        else:
            self._log.warning("away", "%s; until one does, loads are misses and nothing is stored", why)

    def _soon_s(self) -> float:
        return time.monotonic() + self._call_s

    def _by_s(self, timeout_s: float | None) -> float:
        """Until when a call waits that may take so long, the daemon's own deadline unless it is given."""
        return time.monotonic() + GRACE_S + say_seconds(self.link.load_s if timeout_s is None else timeout_s)

    def _begin(
        self,
        verb: str,
        named: Namespace | None,
        words: dict[str, Any],
        timeout_s: float,
        hear: Callable[[dict[str, Any]], Any],
    ) -> Future[Any]:
        """Begins something now, and waits for what comes of it elsewhere."""
        self.link.check()
        try:
            reply = self._about(verb, named, words, time.monotonic() + SLOW_CALL_S)
            number = heard(lambda reply: take(reply, "report", int), reply)
        except Away as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed
        by_s = self._by_s(timeout_s)
        return self._background.run(lambda: heard(hear, self.link.call("report", {"report": number}, by_s)))

    def _about(
        self, verb: str, named: Namespace | None, words: dict[str, Any], by_s: float
    ) -> dict[str, Any]:
        if named is None:
            return self.link.call(verb, words, by_s)
        return self._ask(verb, named, {**words, "namespace": named.digest}, by_s)


def named_by(namespace: Namespace | OpenNamespace) -> Namespace:
    return namespace.namespace if isinstance(namespace, OpenNamespace) else namespace
