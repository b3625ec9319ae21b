"""``announce`` and ``watch`` as a session asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierkv.daemon.session import Session
from tierkv.daemon.words import Words, seconds, take
from tierkv.watching import DEFAULT_S, Watched

MOST_S = 60.0
"""So long ``watched`` waits at most."""

Reply = dict[str, Any]


def _announce(session: Session, words: Words) -> Reply:
    space, chain = session.namespace(words).space, session.chain(words)
    first = take(words, "first", int)
    blocks = range(first, first + take(words, "count", int))
    timeout_s = seconds(words, "timeout_s")
    accepted = session.watches.announce(
        take(words, "number", int),
        lambda on_end: session.client.watching.announce(
            space, chain, blocks, DEFAULT_S if timeout_s is None else timeout_s, on_end
        ),
    )
    return {"accepted": accepted}


def _unannounce(session: Session, words: Words) -> Reply:
    session.watches.unannounce(take(words, "number", int))
    return {}


def _watch(session: Session, words: Words) -> Reply:
    timeout_s = seconds(words, "timeout_s")
    future = session.client.watch(
        session.chain(words),
        count=take(words, "count", int),
        grace_s=seconds(words, "grace_s") or 0.0,
        timeout_s=DEFAULT_S if timeout_s is None else timeout_s,
    )
    watched = session.watches.watch(take(words, "number", int), future)
    return {} if watched is None else {"ended": say_watched(watched)}


def _unwatch(session: Session, words: Words) -> Reply:
    session.watches.unwatch(take(words, "number", int))
    return {}


def _watched(session: Session, words: Words) -> Reply:
    ended, pending = session.watches.ended(min(seconds(words, "timeout_s") or 0.0, MOST_S))
    return {"ended": [[number, *say_watched(watched)] for number, watched in ended], "pending": pending}


def say_watched(watched: Watched) -> list[Any]:
    return [watched.end, watched.match.blocks, watched.match.tokens, dict(watched.match.tiers)]


WATCH_VERBS: dict[str, Callable[[Session, Words], Reply]] = {
    "announce": _announce,
    "unannounce": _unannounce,
    "watch": _watch,
    "unwatch": _unwatch,
    "watched": _watched,
}
WATCH_ONE_WAY = frozenset({"unannounce", "unwatch"})
