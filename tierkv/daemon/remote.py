"""The client of a store in another process: the verbs of ``tierkv.client.Client`` over a daemon's socket.

Blocks do not cross the socket: the daemon's arena is mapped, and this process copies its own bytes. When the daemon is
away, a load is a miss and a store is dropped, at once or within the call's deadline; the link comes back on its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from tierkv.clearing import ClearReport, Evicted
from tierkv.client import AsyncVerbs
from tierkv.clock import SystemClock
from tierkv.copier import CopyPart, HostCopier, KnownMemory, PagedKV, ReadyEvent, told_once
from tierkv.daemon.link import Away, Link, NotOpened
from tierkv.daemon.mapped import RemoteRun
from tierkv.daemon.words import hear_event, hear_stored, say_chain, say_retention, say_spec
from tierkv.errors import HandleError, IdentityError
from tierkv.events import Event
from tierkv.executor import ThreadExecutor, deliver
from tierkv.flush import FlushReport
from tierkv.handles import Draft, DraftBlocks, Lease, Sealed, SlotMemory
from tierkv.health import Health, Reason
from tierkv.ids import FamilyId, Slot
from tierkv.index import Space
from tierkv.intake import Stored
from tierkv.keys import Chain, Namespace, NamespaceSpec
from tierkv.namespaces import OpenNamespace
from tierkv.paging import Pages, copies_into, copies_of
from tierkv.reading import Match
from tierkv.retention import KEEP, Retention
from tierkv.tier import ClearResult
from tierkv.writing import Payload, buffers_of

T = TypeVar("T")
CALL_S = 2.0
"""For calls that the daemon answers from memory."""
GRACE_S = 1.0
"""Beyond the deadline of a call that the daemon waits for itself."""
WORKERS = 8


class RemoteClient:
    """Made by ``tierkv.connect``. Any thread; ``ForkError`` in a forked child, ``ClosedError`` after ``close``."""

    def __init__(self, path: str, *, owner: str = "client") -> None:
        self.link = Link(path, owner)
        self._spaces: dict[bytes, tuple[OpenNamespace, tuple[int, ...] | None]] = {}
        self._abandoned: deque[int] = deque()
        """Drafts that came to nothing, of which the daemon has not been told yet."""
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="tierkv-remote")
        self._executor = ThreadExecutor(SystemClock())
        self.copier = HostCopier(self._executor)
        self._engines = KnownMemory(self.copier)

    # -- names ----------------------------------------------------------------------------------------------------

    def open_namespace(self, spec: NamespaceSpec, *, ranks: Sequence[int] | None = None) -> OpenNamespace:
        """See ``Client.open_namespace``. While the daemon is away the namespace is opened here, and there as soon as it
        is needed."""
        self.link.check()
        namespace = Namespace(spec)
        wanted = None if ranks is None else tuple(ranks)
        known = self._spaces.get(namespace.digest)
        if known is not None and wanted in (None, known[0].ranks):
            return known[0]
        try:
            chosen = tuple(self._open_there(spec, wanted))
        except Away:
            chosen = tuple(range(spec.layout.ranks)) if wanted is None else wanted
        space = Space(0, namespace.digest, namespace.prefix)
        space.claim(spec.layout, chosen)
        opened = OpenNamespace(namespace, space, chosen)
        self._spaces[namespace.digest] = (opened, wanted)
        return opened

    def _open_there(self, spec: NamespaceSpec, ranks: tuple[int, ...] | None) -> list[int]:
        words = {"spec": say_spec(spec), "ranks": None if ranks is None else list(ranks)}
        answered: list[int] = self.link.call("open", words, CALL_S)["ranks"]
        return answered

    def _opened(self, chain: Chain) -> OpenNamespace:
        self.link.check()
        known = self._spaces.get(chain.namespace.digest)
        if known is None:
            raise IdentityError(
                "the chain's namespace was not opened with this client; call open_namespace first"
            )
        return known[0]

    def _ask(
        self, verb: str, namespace: Namespace, words: dict[str, Any], timeout_s: float = CALL_S
    ) -> dict[str, Any]:
        """A call about a namespace, which is opened again where the daemon has forgotten it."""
        while self._abandoned:
            self.link.tell("drop", {"draft": self._abandoned.popleft()})
        try:
            return self.link.call(verb, words, timeout_s)
        except NotOpened:
            _, ranks = self._spaces[namespace.digest]
            self._open_there(namespace.spec, ranks)
            try:
                return self.link.call(verb, words, timeout_s)
            except NotOpened as error:
                raise Away(str(error)) from error

    # -- finding --------------------------------------------------------------------------------------------------

    def match(self, chain: Chain, *, local_computed: int = 0) -> Match:
        self._opened(chain)
        try:
            words = {**say_chain(chain), "local": local_computed}
            return _match(chain, self._ask("match", chain.namespace, words))
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

        def call() -> Match:
            try:
                return _match(chain, self._ask("prefetch", chain.namespace, words, self._within_s(timeout_s)))
            except Away:
                return Match(chain, 0, 0, {})

        return self._pool.submit(call)

    def load_async(
        self,
        chain: Chain,
        *,
        timeout_s: float | None = None,
        owner: str | None = None,
        retention: Retention | None = None,
    ) -> Future[Lease]:
        self._opened(chain)
        return self._pool.submit(self.load, chain, timeout_s=timeout_s, owner=owner, retention=retention)

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
        try:
            reply = self._ask("load", chain.namespace, words, self._within_s(timeout_s))
        except Away:
            return self._nothing(chain)
        memory = self.link.memory
        if not reply["blocks"] or memory is None:
            return self._nothing(chain)
        parts = len(chain.namespace.layout.parts)
        run = RemoteRun(memory, reply["lease"], parts, reply, self._end)
        families = [FamilyId(i) for i in range(reply["blocks"])]
        return Lease(run, chain, families, owner or "client", self._now_s() + self.link.lease_s)

    def _within_s(self, timeout_s: float | None) -> float:
        return (self.link.load_s if timeout_s is None else timeout_s) + GRACE_S

    def _nothing(self, chain: Chain) -> Lease:
        return Lease(_Nowhere(), chain, [], "nobody", float("inf"))

    def _end(self, run: RemoteRun) -> None:
        if self.link.memory is run.memory:  # else the daemon that gave it is gone
            self.link.tell("release", {"lease": run.number})

    def explain(self, chain: Chain) -> str:
        """Why blocks of the chain are a miss, in a few lines."""
        self._opened(chain)
        text: str = self._ask("explain", chain.namespace, say_chain(chain), 10.0)["text"]
        return text

    # -- storing --------------------------------------------------------------------------------------------------

    def reserve(
        self,
        chain: Chain,
        *,
        first: int = 0,
        count: int | None = None,
        rank: int = 0,
        absent: Sequence[int] = (),
        retention: Retention = KEEP,
        result: Stored | None = None,
    ) -> Draft | None:
        opened = self._opened(chain)
        result = Stored() if result is None else result
        count = len(chain) - first if count is None else count
        if not 0 <= first <= first + count <= len(chain):
            raise HandleError(f"blocks {first} to {first + count}: the chain has {len(chain)} full blocks")
        words = {
            **say_chain(chain),
            "first": first,
            "count": count,
            "rank": rank,
            "absent": list(absent),
            "retention": say_retention(retention),
        }
        try:
            reply = self._ask("reserve", chain.namespace, words)
        except Away:
            result.drop("no_daemon", count)
            return None
        hear_stored(reply["result"], result)
        memory = self.link.memory
        if reply.get("draft") is None or memory is None:
            return None
        blocks = _hear_draft(chain, reply, opened)
        number = reply["draft"]

        def discard(_: DraftBlocks) -> None:
            self._abandoned.append(
                number
            )  # a finaliser may call this, so it must not lock: the next call tells

        draft = RemoteDraft(blocks, memory, discard)
        draft.number = number
        return draft

    def commit(
        self,
        sealed: Sealed,
        chain: Chain,
        *,
        absent: Sequence[int] = (),
        retention: Retention = KEEP,
        result: Stored | None = None,
    ) -> Stored:
        self._opened(chain)
        if sealed.namespace_digest != chain.namespace.digest:
            raise HandleError(
                "the sealed blocks are of another namespace than the chain; commit them with theirs"
            )
        if not isinstance(sealed, RemoteSealed):
            raise HandleError("these blocks were reserved in another store than this one")
        result = Stored() if result is None else result
        blocks = sealed.take()
        words = {
            **say_chain(chain),
            "draft": sealed.number,
            "sums": np.array(sealed.checksums, dtype=np.uint64).tobytes(),
            "absent": list(absent),
            "retention": say_retention(retention),
        }
        try:
            return hear_stored(self._ask("commit", chain.namespace, words)["result"], result)
        except Away:
            result.drop("no_daemon", len(blocks.positions))
            return result

    def put(
        self,
        chain: Chain,
        payloads: Sequence[Payload],
        *,
        first: int = 0,
        rank: int = 0,
        absent: Sequence[int] = (),
        retention: Retention = KEEP,
    ) -> Stored:
        result = Stored()
        draft = self.reserve(
            chain,
            first=first,
            count=len(payloads),
            rank=rank,
            absent=absent,
            retention=retention,
            result=result,
        )
        if draft is None:
            return result
        with draft:
            for i, position in enumerate(draft.blocks.positions):
                draft.fill(i, buffers_of(payloads[position - first], position))
            sealed = draft.seal()
        return self.commit(sealed, chain, absent=absent, retention=retention, result=result)

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
        self._engines.check(kv, chain.namespace)
        result = Stored()
        future: Future[Stored] = Future()
        draft = self.reserve(
            chain,
            first=first,
            count=len(pages),
            rank=rank,
            absent=absent,
            retention=retention,
            result=result,
        )
        if draft is None:
            deliver(future, result)
            return future
        copies: list[CopyPart] = []
        try:
            copies += copies_into(draft, pages, first)
        finally:
            if not copies:
                draft.drop()

        def done(error: str | None) -> None:
            copies.clear()
            if error is None:
                self.commit(draft.seal(), chain, absent=absent, retention=retention, result=result)
            else:
                result.drop("copy_failed", len(draft))
                draft.drop()
            deliver(future, result)

        self.copier.offload(kv, copies, ready, told_once(done, lambda: None))
        return future

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
        self._engines.check(kv, lease.chain.namespace)
        future: Future[bool] = Future()
        run = lease.lessor
        if not isinstance(run, RemoteRun):
            deliver(future, run is not None and not len(lease))
            return future
        found = copies_of(run, lease, pages, opened.parts_of(rank), skip)
        if found is None:
            deliver(future, False)
            return future
        refs = [ref for ref, _ in found]
        copies = [copy for _, copy in found]
        found.clear()

        def done(error: str | None) -> None:
            copies.clear()
            held = not lease.released and all(run.still_holds(ref.family, ref.part) for ref in refs)
            deliver(future, error is None and held)

        self.copier.onboard(kv, copies, told_once(done, lambda: None), on_layer)
        return future

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
        words = {**say_chain(chain), "timeout_s": timeout_s, "ttl_s": ttl_s}
        try:
            return int(self._ask("pin", chain.namespace, words, self._within_s(timeout_s))["blocks"])
        except Away:
            return 0

    def unpin(self, chain: Chain) -> int:
        self._opened(chain)
        try:
            return int(self._ask("unpin", chain.namespace, say_chain(chain))["blocks"])
        except Away:
            return 0

    def flush(self, tier: str, *, timeout_s: float = 30.0) -> Future[FlushReport]:
        """Raises ``Away`` from the future when there is no daemon: nobody flushed."""
        self.link.check()
        words = {"tier": tier, "timeout_s": timeout_s}
        return self._pool.submit(lambda: FlushReport(**self.link.call("flush", words, timeout_s + GRACE_S)))

    def evict(self, tier: str, *, namespace: Namespace | OpenNamespace | None = None) -> Evicted:
        words: dict[str, Any] = {"tier": tier}
        if namespace is None:
            return Evicted(**self.link.call("evict", words, 30.0))
        named = _named(namespace)
        return Evicted(**self._ask("evict", named, {**words, "namespace": named.digest}, 30.0))

    def clear(
        self,
        *,
        namespace: Namespace | OpenNamespace | None = None,
        tenant_salt: str | None = None,
        timeout_s: float = 30.0,
    ) -> Future[ClearReport]:
        """Nothing can be matched as soon as the future is done. It raises ``Away`` when there is no daemon."""
        self.link.check()
        if namespace is not None and tenant_salt is not None:
            raise IdentityError("give a namespace or a tenant's salt, not both")
        words: dict[str, Any] = {"salt": tenant_salt, "timeout_s": timeout_s}

        def call() -> ClearReport:
            if namespace is None:
                reply = self.link.call("clear", words, timeout_s + GRACE_S)
            else:
                named = _named(namespace)
                reply = self._ask("clear", named, {**words, "namespace": named.digest}, timeout_s + GRACE_S)
            return ClearReport({name: ClearResult(**its) for name, its in reply["tiers"].items()})

        return self._pool.submit(call)

    def bump_epoch(
        self, namespace: Namespace | OpenNamespace, *, timeout_s: float = 30.0
    ) -> tuple[OpenNamespace, Future[ClearReport]]:
        named = _named(namespace)
        known = self._spaces.get(named.digest)
        cleared = self.clear(namespace=named, timeout_s=timeout_s)
        spec = replace(named.spec, weights_epoch=named.spec.weights_epoch + 1)
        return self.open_namespace(spec, ranks=known[0].ranks if known is not None else None), cleared

    def sleep(self, *, keep: bool, timeout_s: float = 30.0) -> Future[Evicted]:
        self.link.check()
        words = {"keep": keep, "timeout_s": timeout_s}
        return self._pool.submit(lambda: Evicted(**self.link.call("sleep", words, timeout_s + GRACE_S)))

    def wake(self) -> None:
        self.link.call("wake", {}, CALL_S)

    # -- facts and life -------------------------------------------------------------------------------------------

    def report_prefill(self, tokens: int, seconds: float) -> None:
        try:
            self.link.call("report_prefill", {"tokens": tokens, "seconds": seconds}, CALL_S)
        except Away:
            pass

    def stats(self) -> dict[str, object]:
        """The daemon's. Raises ``Away``."""
        found: dict[str, object] = self.link.call("stats", {}, CALL_S)["stats"]
        return found

    def health(self) -> Health:
        try:
            words = self.link.call("health", {}, CALL_S)
        except Away as error:
            return Health("unhealthy", False, (Reason("daemon", "unhealthy", str(error)),))
        return Health(words["state"], words["ready"], tuple(Reason(*reason) for reason in words["reasons"]))

    def events(self, after: int = 0, *, timeout_s: float = 0.0) -> list[Event]:
        words = {"after": after, "timeout_s": timeout_s}
        return [hear_event(one) for one in self.link.call("events", words, timeout_s + CALL_S)["events"]]

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the session; the daemon takes back what it held. Harmless the second time."""
        self.link.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._executor.close(1.0 if timeout_s is None else timeout_s)

    @property
    def aio(self) -> AsyncVerbs:
        return AsyncVerbs(self)

    def _now_s(self) -> float:
        return SystemClock().now_s()

    def __enter__(self) -> RemoteClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteSealed(Sealed):
    """Written blocks that the daemon is to be told of."""

    __slots__ = ("number",)
    number: int


class RemoteDraft(Draft):
    """Slots that a daemon reserved."""

    __slots__ = ("number",)
    number: int

    def seal(self) -> RemoteSealed:
        plain = super().seal()
        sealed = RemoteSealed(plain.take(), plain.checksums, self._discard)
        sealed.number = self.number
        return sealed


class _Nowhere:
    """The lessor of an empty lease, and its memory: there is none."""

    def __init__(self) -> None:
        self.memory: SlotMemory = self

    def view(self, slot: Slot) -> memoryview:
        raise HandleError("an empty lease has no blocks")

    def generation(self, slot: Slot) -> int:
        raise HandleError("an empty lease has no blocks")

    def slot_of(self, family: FamilyId, part: int) -> Slot:
        raise HandleError("an empty lease has no blocks")

    def expects(self, family: FamilyId) -> int:
        raise HandleError("an empty lease has no blocks")

    def take_back(self, lease: Lease) -> None:
        pass

    def let_go(self, families: Sequence[FamilyId]) -> None:
        pass


def _match(chain: Chain, words: dict[str, Any]) -> Match:
    return Match(chain, words["blocks"], words["tokens"], words["tiers"])


def _load_words(chain: Chain, timeout_s: float | None, retention: Retention | None) -> dict[str, Any]:
    said = None if retention is None else say_retention(retention)
    return {**say_chain(chain), "timeout_s": timeout_s, "retention": said}


def _hear_draft(chain: Chain, reply: dict[str, Any], opened: OpenNamespace) -> DraftBlocks:
    positions = np.frombuffer(reply["positions"], dtype=np.int32).tolist()
    parts = tuple(reply["parts"])
    table = np.frombuffer(reply["slots"], dtype=np.int32).reshape(len(positions), len(parts))
    sizes = tuple(opened.namespace.layout.parts[part].payload_bytes for part in parts)
    return DraftBlocks(chain, positions, parts, sizes, [tuple(map(Slot, row)) for row in table.tolist()])


def _named(namespace: Namespace | OpenNamespace) -> Namespace:
    return namespace.namespace if isinstance(namespace, OpenNamespace) else namespace
