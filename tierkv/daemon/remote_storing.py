"""The verbs of a remote client that store: slots are asked for, this process writes into them, and says so."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from tierkv.arguments import checked
from tierkv.clock import Clock, SystemClock
from tierkv.daemon.link import Link, Meanwhile, nothing
from tierkv.daemon.remote_calls import RemoteCalls
from tierkv.daemon.remote_filling import Ahead, Filler
from tierkv.daemon.remote_handles import Drafts, RemoteDraft, RemoteSealed
from tierkv.daemon.replies import heard
from tierkv.daemon.tenant import Tenant
from tierkv.daemon.words import hear_stored, say_chain, say_retention
from tierkv.errors import Away, HandleError
from tierkv.executor import ThreadExecutor
from tierkv.filling import Payload
from tierkv.handles import Draft, Sealed
from tierkv.intake import Stored
from tierkv.keys import Chain
from tierkv.retention import KEEP, Retention


@checked
class RemoteStoring(RemoteCalls):
    """Any thread."""

    def __init__(self, link: Link, call_s: float, tenant: Tenant) -> None:
        super().__init__(link, call_s, tenant)
        self.clock: Clock = SystemClock()
        self._numbers = itertools.count(1)
        self._drafts = Drafts(link)
        self._executor = ThreadExecutor(self.clock)
        self._filler = Filler(self._executor)

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
        return self._reserve(chain, first, count, rank, absent, retention, result)

    def _reserve(
        self,
        chain: Chain,
        first: int,
        count: int | None,
        rank: int,
        absent: Sequence[int],
        retention: Retention,
        result: Stored | None,
        meanwhile: Meanwhile = nothing,
    ) -> RemoteDraft | None:
        opened = self._opened(chain)
        opened.parts_of(rank, absent)
        opened.expected(absent)
        result = Stored() if result is None else result
        count = len(chain) - first if count is None else count
        if not 0 <= first <= first + count <= len(chain):
            raise HandleError(f"blocks {first} to {first + count}: the chain has {len(chain)} full blocks")
        number = next(self._numbers)
        words = {
            **say_chain(chain),
            "first": first,
            "count": count,
            "rank": rank,
            "absent": list(absent),
            "retention": say_retention(retention),
            "draft": number,
        }
        try:
            with self._or_give_up("drop", {"draft": number}):
                reply = self._ask("reserve", chain.namespace, words, self._soon_s(), meanwhile)
                draft = heard(lambda its: self._drafts.hear(number, chain, opened, its), reply)
                heard(lambda its: hear_stored(its["result"], result), reply)
        except Away:
            result.drop("no_daemon", count)
            return None
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
        words = {
            **say_chain(chain),
            "draft": sealed.number,
            "sums": np.array(sealed.checksums, dtype=np.uint64).tobytes(),
            "absent": list(absent),
            "retention": say_retention(retention),
        }
        blocks = len(sealed.blocks.positions)
        try:
            if sealed.memory is not self.link.memory:
                raise Away("the daemon that gave the slots is gone")
            reply = self._ask("commit", chain.namespace, words, self._soon_s())
            heard(lambda its: hear_stored(its["result"], result), reply)
        except Away:
            sealed.drop()
            result.drop("no_daemon", blocks)
            return result
        sealed.take()
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
        opened, result = self._opened(chain), Stored()
        parts = chain.namespace.layout.parts
        ahead = Ahead(payloads, first, [parts[part].payload_bytes for part in opened.parts_of(rank, absent)])
        draft = self._reserve(
            chain, first, len(payloads), rank, absent, retention, result, meanwhile=ahead.take
        )
        if draft is None:
            return result
        with draft:
            for index, sums in enumerate(
                self._filler.fill(draft.memory, draft.blocks, payloads, ahead, first)
            ):
                draft.note_checksums(index, sums)
            sealed = draft.seal()
        return self.commit(sealed, chain, absent=absent, retention=retention, result=result)
