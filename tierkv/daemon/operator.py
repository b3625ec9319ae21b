"""The daemon's answers to people: status, match, explain, prefetch, pin, unpin, clear.

The same over HTTP and over the daemon's own socket, where only root and the daemon's own user are answered: they learn
of every tenant. An answer is plain values. Nothing here reads or writes a block's bytes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final, NamedTuple

from tierkv import __version__
from tierkv.client import Client
from tierkv.config import Config
from tierkv.daemon.plain import plain
from tierkv.daemon.questions import (
    A_NAMESPACE,
    LEAST_DIGITS,
    MOST_WAIT_S,
    NotThere,
    QuestionError,
    optional,
    parse,
    prompt_of,
    seconds,
)
from tierkv.daemon.session import Session
from tierkv.daemon.wire import VERSION
from tierkv.daemon.words import take
from tierkv.errors import TierKVError
from tierkv.index import USABLE, Space
from tierkv.keys import Chain, chain_of_blocks
from tierkv.namespaces import OpenNamespace
from tierkv.reading import Match, Reader
from tierkv.store import TieredStore
from tierkv.totals import tokens_of

Words = dict[str, Any]

MOST_LISTED: Final = 1000
"""Leases, sessions and namespaces in a status; how many there are in all is told too."""
MOST_HOT: Final = 20
"""Prefixes in a status."""
MIB: Final = 2**20
SMALL: Final = 64 * 1024
LARGE: Final = 24 * MIB
"""So long is a question with as many hashes or tokens as are taken."""
GRACE_S: Final = 5.0

_PROMPT = frozenset({"namespace", "tokens", "hashes", "adapter", "cache_salt"})


class Question(NamedTuple):
    """What may be asked: its words, how long its text may be, and whether the answer waits for tiers."""

    words: frozenset[str]
    most_bytes: int
    slow: bool


QUESTIONS: Mapping[str, Question] = {
    "status": Question(frozenset(), SMALL, False),
    "match": Question(_PROMPT, LARGE, False),
    "explain": Question(_PROMPT, LARGE, False),
    "prefetch": Question(_PROMPT | {"timeout_s"}, LARGE, True),
    "pin": Question(_PROMPT | {"timeout_s", "ttl_s"}, LARGE, True),
    "unpin": Question(_PROMPT, LARGE, False),
    "clear": Question(frozenset({"namespace", "tenant_salt", "everything", "timeout_s"}), SMALL, True),
}


class NotAllowed(TierKVError):
    """Who asks is not an operator."""


class Operator:
    """Thread-safe. An answer that waits for tiers ends by the ``timeout_s`` of its question."""

    def __init__(
        self, store: TieredStore, config: Config, sessions: Callable[[], list[dict[str, Any]]]
    ) -> None:
        self.store = store
        self._config = config
        self._sessions = sessions
        self._client = Client(store, owner="operator")
        self._reader = Reader(store)
        self._started_s = store.clock.now_s()
        self._started_at = time.time()
        self._calls: Mapping[str, Callable[[Words], Words]] = {
            "status": self._status,
            "match": self._match,
            "explain": self._explain,
            "prefetch": self._prefetch,
            "pin": self._pin,
            "unpin": self._unpin,
            "clear": self._clear,
        }

    def ask(self, name: str, body: bytes) -> Words:
        """Raises ``QuestionError``, ``NotThere``, ``TimeoutError``, and what the store says is wrong."""
        call = self._calls.get(name)
        if call is None:
            raise QuestionError(f"{name!r} cannot be asked; there are {', '.join(self._calls)}")
        question = QUESTIONS[name]
        if len(body) > question.most_bytes:
            raise QuestionError(f"{len(body)} bytes: {name} takes at most {question.most_bytes}")
        return call(parse(body, question.words))

    def answer(self, session: Session, words: Mapping[str, Any]) -> dict[str, Any]:
        """The verb ``ask`` of the daemon's socket. Raises ``NotAllowed`` too."""
        if session.uid not in (0, os.getuid()):
            raise NotAllowed("only root and the daemon's own user are answered this: it concerns all tenants")
        told = self.ask(take(words, "question", str), take(words, "body", bytes))
        return {"answer": json.dumps(told).encode()}

    # -- prompts --------------------------------------------------------------------------------------------------

    def _chain(self, words: Words) -> Chain:
        prompt = prompt_of(words)
        namespace = self._opened(prompt.namespace).namespace
        if prompt.tokens is not None:
            if namespace.spec.hash_scheme != "tokens":
                raise QuestionError(
                    f"tokens: the blocks of namespace {namespace.digest.hex()[:16]} are named by its engine "
                    f"({namespace.spec.hash_scheme}); ask by the hashes of its blocks (--hashes)"
                )
            return namespace.chain(list(prompt.tokens), extras=prompt.extras)
        return chain_of_blocks(namespace, prompt.hashes or ())

    def _opened(self, digits: str) -> OpenNamespace:
        space = self._space(digits)
        opened = self._client.adopt(space.digest)
        if opened is None:
            raise NotThere(
                f"namespace {space.digest.hex()[:16]} is known from before the last start, and no engine has opened it "
                "since: its blocks cannot be named"
            )
        return opened

    def _space(self, digits: str) -> Space:
        """The namespace whose digest begins so."""
        wanted = digits.strip().lower()
        if len(wanted) < LEAST_DIGITS or wanted.strip("0123456789abcdef"):
            shown = repr(digits[: LEAST_DIGITS * 10])
            raise QuestionError(f"namespace = {shown}: {A_NAMESPACE} is expected")
        found = [
            space for space in list(self.store.catalog.index.spaces) if space.digest.hex().startswith(wanted)
        ]
        if not found:
            raise NotThere(
                f"namespace = {wanted}: no namespace begins with it; status lists those that are known"
            )
        if len(found) > 1:
            raise QuestionError(f"namespace = {wanted}: {len(found)} begin with it; give more digits")
        return found[0]

    # -- the questions --------------------------------------------------------------------------------------------

    def _match(self, words: Words) -> Words:
        chain = self._chain(words)
        return _found(chain, self._reader.peek(self._opened(words["namespace"]).space, chain))

    def _prefetch(self, words: Words) -> Words:
        timeout_s = self._wait_s(words)
        chain = self._chain(words)
        found = self._client.prefetch(chain, timeout_s=timeout_s).result(timeout_s + GRACE_S)
        return _found(chain, found)

    def _explain(self, words: Words) -> Words:
        chain = self._chain(words)
        told = self._client.explain(chain)
        first = told.first_missing
        return {
            "blocks": told.blocks,
            "usable": told.usable,
            "tokens": told.tokens,
            "causes": {cause.name.lower(): count for cause, count in told.causes.items()},
            "first_missing": None if first is None else {
                "position": first.position,
                "hash": first.block_hash.hex(),
                "cause": first.cause.name.lower(),
                "detail": first.detail,
                "left": [asdict(one) for one in first.left],
            },
            "twins": [{"namespace": twin.namespace.hex(), "text": str(twin)} for twin in told.twins],
            "notes": list(told.notes),
            "text": str(told),
        }  # fmt: skip

    def _pin(self, words: Words) -> Words:
        ttl_s = seconds(words, "ttl_s", 1e9)
        if ttl_s == 0:
            raise QuestionError(
                "ttl_s = 0: more than 0 s are expected; left out, it is until they are unpinned"
            )
        timeout_s = self._wait_s(words)
        chain = self._chain(words)
        pinned = self._client.pin(chain, timeout_s=timeout_s, ttl_s=ttl_s)
        return {"blocks": len(chain), "pinned": pinned, "budget": self._pins()}

    def _unpin(self, words: Words) -> Words:
        chain = self._chain(words)
        return {"blocks": len(chain), "unpinned": self._client.unpin(chain), "budget": self._pins()}

    def _pins(self) -> Words:
        stats: Words = plain(self.store.pins.stats())
        return stats

    def _clear(self, words: Words) -> Words:
        """Of exactly one thing, so that nobody clears everything by leaving a word out."""
        timeout_s = self._wait_s(words)
        namespace, salt = optional(words, "namespace", str, A_NAMESPACE), optional(words, "tenant_salt", str)
        everything = words.get("everything", False)
        if not isinstance(everything, bool):
            raise QuestionError(f"everything = {everything!r}: true or false is expected")
        there = {
            "namespace": namespace is not None,
            "tenant_salt": salt is not None,
            "everything": everything,
        }
        given = [name for name, is_there in there.items() if is_there]
        if len(given) != 1:
            raise QuestionError(
                f"{' and '.join(given) or 'none'} of namespace, tenant_salt and everything given: say what to clear by "
                "exactly one (everything = true for all there is)"
            )
        if namespace is not None:
            prefix = self._space(namespace).prefix
            self.store.pins.remove_under(prefix)
            future = self.store.clearing.clear(prefix, timeout_s)
        else:
            future = self._client.clear(tenant_salt=salt, timeout_s=timeout_s)
        report = future.result(timeout_s + GRACE_S)
        tiers = {name: plain(asdict(result)) for name, result in report.tiers.items()}
        return {"complete": report.complete, "tiers": tiers}

    def _wait_s(self, words: Words) -> float:
        given = seconds(words, "timeout_s", MOST_WAIT_S)
        return self.store.limits.load_deadline_s if given is None else given

    # -- status ---------------------------------------------------------------------------------------------------

    def _status(self, words: Words) -> Words:
        stats = self.store.stats()
        health = self.store.health()
        sessions = self._sessions()
        leases = self._leases()
        spaces = list(self.store.catalog.index.spaces)
        return {
            "release": __version__,
            "protocol": VERSION,
            "pid": os.getpid(),
            "started_at": round(self._started_at, 3),
            "up_s": round(self.store.clock.now_s() - self._started_s, 3),
            "health": {
                "state": health.state,
                "ready": health.ready,
                "reasons": [reason._asdict() for reason in health.reasons],
            },
            "configuration": [
                {"key": one.key, "value": plain(one.value), "origin": one.origin} for one in self._config.effective
            ],
            "notes": list(self._config.notes),
            "tiers": plain(stats["tiers"]),
            "edges": self._edges(),
            "blocks": stats["families"],
            "counters": plain(stats["counters"]),
            "asked": plain(stats["asked"]),
            "asked_tokens": self._asked_tokens(),
            "hot": self._hot(),
            "tenants": plain(stats["tenants"]),
            "pins": self._pins(),
            "leases": {"count": len(leases), "leases": leases[:MOST_LISTED]},
            "sessions": {"count": len(sessions), "sessions": plain(sessions[:MOST_LISTED])},
            "namespaces": {"count": len(spaces), "latest": [_named(one) for one in spaces[: -MOST_LISTED - 1 : -1]]},
        }  # fmt: skip

    def _edges(self) -> Words:
        found: Words = {}
        now_s = self.store.clock.now_s()
        for edge in self.store.edges.values():
            for name, speed, timing in (
                (edge.down, edge.write_speed, edge.write_times),
                (edge.up, edge.read_speed, edge.read_times),
            ):
                found[name] = {
                    "pending_bytes": edge.queue.pending_bytes(name),
                    "bytes_per_s": plain(speed.bytes_per_s),
                    "calls": timing.facts(now_s),
                    "breaker_open": edge.tier.breaker.is_open,
                }
        return found

    def _asked_tokens(self) -> Words:
        """What requests asked for, got, and would have got from an endless cache, in tokens."""
        asked = tokens_of(self.store.catalog).values()
        ceiling = asked["ceiling"]
        return {
            "asked": asked["asked_blocks"],
            "hit": asked["hit_blocks"],
            "ceiling": None if ceiling is None else round(ceiling * (asked["asked_blocks"] or 0)),
        }

    def _hot(self) -> list[Words]:
        found = []
        for one in self.store.hot.top(MOST_HOT):
            space = self.store.catalog.index.space(one.namespace)
            if space is None or space.layout is None:
                continue
            tiers = self.store.catalog.held_by_tier(
                self.store.catalog.find_run(space, (one.block_hash,), USABLE)
            )
            found.append(
                {
                    "namespace": one.namespace.hex(),
                    "hash": one.block_hash.hex(),
                    "blocks": one.blocks,
                    "tokens": one.blocks * space.layout.block_tokens,
                    "loads": one.loads,
                    "tiers": [tier for tier, count in tiers.items() if count],
                }
            )
        return found

    def _leases(self) -> list[Words]:
        """Those that end next come first; pins have no end and stand at the back."""
        now_s = self.store.clock.now_s()
        leases = sorted(self.store.leases.all(), key=lambda lease: lease.at_s)
        return [
            {
                "owner": lease.owner,
                "blocks": len(lease),
                "namespace": lease.chain.namespace.digest.hex(),
                "overdue": lease.at_s <= now_s,
                "ends_in_s": None if lease.at_s == float("inf") else round(lease.at_s - now_s, 3),
            }
            for lease in leases
        ]


def _found(chain: Chain, found: Match) -> Words:
    return {
        "blocks": found.blocks,
        "tokens": found.tokens,
        "of_blocks": len(chain),
        "tiers": dict(found.tiers),
    }


def _named(space: Space) -> Words:
    """A namespace for people. Its salt is never told."""
    words: Words = {"digest": space.digest.hex(), "blocks": len(space), "epoch": space.epoch, "opened": False}
    if space.namespace is not None:
        spec = space.namespace.spec
        words |= {
            "opened": True,
            "engine": spec.engine,
            "weights": {"kind": spec.weights.kind, "value": spec.weights.value},
            "layout": spec.layout.layout_id,
            "dtype": spec.layout.dtype,
            "block_tokens": spec.layout.block_tokens,
            "parts": len(spec.layout.parts),
            "named_by": spec.hash_scheme,
            "has_salt": spec.salt is not None,
        }
    return words
