"""What a session can ask for: each verb takes the session and the words of the request, and gives the words of the
reply. They run on the thread of the connection, which waits as long as the verb does."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from tierkv.clearing import ClearReport
from tierkv.daemon.explained import say_explanation
from tierkv.daemon.plain import plain
from tierkv.daemon.session import Session
from tierkv.daemon.watch_verbs import WATCH_ONE_WAY, WATCH_VERBS
from tierkv.daemon.wire import WireError
from tierkv.daemon.words import (
    Words,
    hear_retention,
    hear_spec,
    ints,
    name_of,
    say_event,
    say_stored,
    seconds,
    take,
    take_if,
)
from tierkv.errors import HandleError
from tierkv.handles import Draft, Lease
from tierkv.ids import FamilyId
from tierkv.intake import Stored
from tierkv.namespaces import OpenNamespace
from tierkv.store import TieredStore

Reply = dict[str, Any]
Verb = Callable[[Session, Words], Reply]

MOST_EVENTS = 10_000
FEW_CELLS = 64
"""Slots that are looked up one by one."""
WAIT_S = 60.0
"""No call waits longer than this, whatever it asks for."""


def _open(session: Session, words: Words) -> Reply:
    ranks = words.get("ranks")
    spec = hear_spec(take(words, "spec", dict))
    opened = session.client.open_namespace(spec, ranks=None if ranks is None else ints(words, "ranks"))
    return {"namespace": opened.namespace.digest, "ranks": list(opened.ranks)}


def _match(session: Session, words: Words) -> Reply:
    chain = session.chain(words)
    found = session.client.match(chain, local_computed=take_if(words, "local", int, 0))
    return {"blocks": found.blocks, "tokens": found.tokens, "tiers": dict(found.tiers)}


def _prefetch(session: Session, words: Words) -> Reply:
    timeout_s = _timeout_s(words)
    found = session.client.prefetch(
        session.chain(words),
        timeout_s=timeout_s,
        local_computed=take_if(words, "local", int, 0),
        retention=hear_retention(words) if words.get("retention") else None,
    ).result(WAIT_S)
    return {"blocks": found.blocks, "tokens": found.tokens, "tiers": dict(found.tiers)}


def _load(session: Session, words: Words) -> Reply:
    chain = session.chain(words)
    retention = hear_retention(words) if words.get("retention") else None
    number = take(words, "lease", int)
    lease = session.client.load(
        chain, timeout_s=_timeout_s(words), owner=_owner(session, words), retention=retention
    )
    if not len(lease):
        lease.release()
        return {"blocks": 0}
    reply: Reply = {**_places(session, lease), "blocks": len(lease)}
    if lease.colder:
        reply["colder"] = lease.colder
    try:
        session.keep_lease(number, lease)
    except HandleError:  # it holds too many, or has given this one up: for it this is a miss
        return {"blocks": 0}
    return reply


def _owner(session: Session, words: Words) -> str:
    return f"{name_of(take_if(words, 'owner', str, session.owner))} (pid {session.pid})"


def _places(session: Session, lease: Lease) -> Reply:
    """Where the parts of the leased blocks lie: for each block a row of slots, and what each slot's generation is."""
    store = session.client.store
    parts = len(lease.chain.namespace.layout.parts)
    if len(lease) * parts <= FEW_CELLS:
        return _few_places(store, lease.families, parts)
    rows = np.array(lease.families)
    slots = store.catalog.index.slots[rows][:, :parts]
    generations = np.frombuffer(store.host.arena.table.generations, dtype=np.uint32)
    known = np.where(slots >= 0, generations[slots], 0).astype(np.uint32)
    expected = store.catalog.index.array("expected")[rows]
    return {
        "slots": np.ascontiguousarray(slots, dtype=np.int32).tobytes(),
        "generations": known.tobytes(),
        "expected": expected.astype(np.int64).tobytes(),
    }


def _few_places(store: TieredStore, families: Sequence[FamilyId], parts: int) -> Reply:
    """The same, cell by cell: numpy takes longer to begin."""
    index, generations = store.catalog.index, store.host.arena.table.generations
    cells, width = index.slot_table
    slots = [cells[family * width + part] for family in families for part in range(parts)]
    return {
        "slots": array("i", slots).tobytes(),
        "generations": array("I", [generations[slot] if slot >= 0 else 0 for slot in slots]).tobytes(),
        "expected": array("q", [index.expected[family] for family in families]).tobytes(),
    }


def _release(session: Session, words: Words) -> Reply:
    session.end_lease(take(words, "lease", int))
    return {}


def _shorten(session: Session, words: Words) -> Reply:
    session.shorten_lease(take(words, "lease", int), take(words, "blocks", int))
    return {}


def _reserve(session: Session, words: Words) -> Reply:
    chain, result = session.chain(words), Stored()
    number = take(words, "draft", int)
    draft = session.client.reserve(
        chain,
        first=take(words, "first", int),
        count=take(words, "count", int),
        rank=take_if(words, "rank", int, 0),
        absent=ints(words, "absent"),
        retention=hear_retention(words),
        result=result,
    )
    reply: Reply = {"result": say_stored(result)}
    if draft is not None:
        said, blocks = _say_draft(draft), len(draft)
        try:
            session.keep_draft(number, draft)
        except HandleError:  # it holds too many, or has given this one up
            result.drop("no_room", blocks)
            return {"result": say_stored(result)}
        reply |= said
    return reply


def _say_draft(draft: Draft) -> Reply:
    blocks = draft.blocks
    return {
        "positions": array("i", blocks.positions).tobytes(),
        "parts": list(blocks.parts),
        "slots": array("i", [slot for row in blocks.slots for slot in row]).tobytes(),
    }


def _commit(session: Session, words: Words) -> Reply:
    chain = session.chain(words)
    draft = session.take_draft(take(words, "draft", int))
    with draft:
        blocks = draft.blocks
        sums = take(words, "sums", bytes)
        if len(sums) != 8 * len(blocks.positions) * len(blocks.parts):
            raise WireError(f"{len(sums)} bytes of checksums for {len(blocks.positions)} blocks")
        table = np.frombuffer(sums, dtype=np.uint64).reshape(len(blocks.positions), len(blocks.parts))
        for row, its in enumerate(table.tolist()):
            draft.note_checksums(row, tuple(its))
        sealed = draft.seal()
    stored = session.client.commit(
        sealed, chain, absent=ints(words, "absent"), retention=hear_retention(words)
    )
    return {"result": say_stored(stored)}


def _drop(session: Session, words: Words) -> Reply:
    session.drop_draft(take(words, "draft", int))
    return {}


def _bye(session: Session, words: Words) -> Reply:
    session.end(ints(words, "writing"))
    return {}


def _pin(session: Session, words: Words) -> Reply:
    pinned = session.client.pin(
        session.chain(words),
        timeout_s=_timeout_s(words),
        ttl_s=seconds(words, "ttl_s"),
        owner=_owner(session, words),
    )
    return {"blocks": pinned}


def _unpin(session: Session, words: Words) -> Reply:
    return {"blocks": session.client.unpin(session.chain(words))}


def _flush(session: Session, words: Words) -> Reply:
    begun = session.client.flush(take(words, "tier", str), timeout_s=_timeout_s(words, 30.0))
    return {"report": session.keep_report(begun)}


def _evict(session: Session, words: Words) -> Reply:
    namespace = _namespace_if(session, words)
    tier, timeout_s = take(words, "tier", str), _timeout_s(words, 30.0)
    return asdict(session.client.evict(tier, namespace=namespace, timeout_s=timeout_s))


def _clear(session: Session, words: Words) -> Reply:
    salt = words.get("salt")
    begun = session.client.clear(
        namespace=_namespace_if(session, words),
        tenant_salt=None if salt is None else take(words, "salt", str),
        timeout_s=_timeout_s(words, 30.0),
    )
    return {"report": session.keep_report(begun)}


def _sleep(session: Session, words: Words) -> Reply:
    begun = session.client.sleep(keep=take(words, "keep", bool), timeout_s=_timeout_s(words, 30.0))
    return {"report": session.keep_report(begun)}


def _report(session: Session, words: Words) -> Reply:
    """What a flush, a clear or a sleep that was begun has come to."""
    found = session.report(take(words, "report", int)).result(WAIT_S)
    if isinstance(found, ClearReport):
        return {"tiers": {name: asdict(result) for name, result in found.tiers.items()}}
    return asdict(found)


def _wake(session: Session, words: Words) -> Reply:
    session.client.wake()
    return {}


def _report_prefill(session: Session, words: Words) -> Reply:
    took_s = seconds(words, "seconds")
    if took_s is not None:
        session.client.report_prefill(take(words, "tokens", int), took_s)
    return {}


def _stats(session: Session, words: Words) -> Reply:
    return {"stats": plain(session.client.stats())}


def _health(session: Session, words: Words) -> Reply:
    health = session.client.health()
    return {
        "state": health.state,
        "ready": health.ready,
        "reasons": [tuple(reason) for reason in health.reasons],
    }


def _events(session: Session, words: Words) -> Reply:
    timeout_s = seconds(words, "timeout_s") or 0.0
    found = session.client.events(take_if(words, "after", int, 0), timeout_s=min(timeout_s, WAIT_S))
    return {"events": [say_event(event) for event in found[:MOST_EVENTS]]}


def _explain(session: Session, words: Words) -> Reply:
    """What other tenants store is no engine's business: of other names it is told those that it has opened itself."""
    told = session.client.explain(session.chain(words))
    own = tuple(twin for twin in told.twins if session.client.opened(twin.namespace) is not None)
    return say_explanation(replace(told, twins=own))


def _namespace_if(session: Session, words: Words) -> OpenNamespace | None:
    return None if words.get("namespace") is None else session.namespace(words)


def _timeout_s(words: Words, otherwise: float | None = None) -> Any:
    timeout_s = seconds(words, "timeout_s")
    return otherwise if timeout_s is None else min(timeout_s, WAIT_S - 1.0)


def _ping(session: Session, words: Words) -> Reply:
    """Says that it is there."""
    return {}


VERBS: dict[str, Verb] = {
    "ping": _ping,
    "open": _open,
    "match": _match,
    "prefetch": _prefetch,
    "load": _load,
    "release": _release,
    "shorten": _shorten,
    "reserve": _reserve,
    "commit": _commit,
    "drop": _drop,
    "bye": _bye,
    "report": _report,
    "pin": _pin,
    "unpin": _unpin,
    "flush": _flush,
    "evict": _evict,
    "clear": _clear,
    "sleep": _sleep,
    "wake": _wake,
    "report_prefill": _report_prefill,
    "stats": _stats,
    "health": _health,
    "events": _events,
    "explain": _explain,
    **WATCH_VERBS,
}
ONE_WAY = frozenset({"release", "shorten", "drop"}) | WATCH_ONE_WAY
"""Verbs without a reply: nobody waits for them."""
