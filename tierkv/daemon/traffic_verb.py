"""The verb ``requests`` of the daemon's socket, for ``tierkv record``: which blocks were asked for, to operators only.

No tokens, no payload, no salt. A block is told by eight bytes of its hash, which is enough to see that it is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from tierkv.daemon.operator import NotAllowed
from tierkv.daemon.session import Session
from tierkv.daemon.words import take
from tierkv.traffic import Asked, Traffic

NAME_BYTES: Final = 8


def traffic_verb(traffic: Traffic) -> Callable[[Session, Mapping[str, Any]], dict[str, Any]]:
    """``after``: the number of the last request that the listener knows; without it, from now on."""

    def answer(session: Session, words: Mapping[str, Any]) -> dict[str, Any]:
        if session.uid not in (0, os.getuid()):
            raise NotAllowed("only root and the daemon's own user are told this: it concerns all tenants")
        heard = traffic.listen(None if words.get("after") is None else take(words, "after", int))
        return {
            "pid": os.getpid(),
            "recording": heard.recording,
            "now_s": heard.now_s,
            "last": heard.last,
            "lost": heard.lost,
            "requests": [_said(asked) for asked in heard.requests],
        }

    return answer


def _said(asked: Asked) -> list[Any]:
    names = b"".join(block_hash[NAME_BYTES : 2 * NAME_BYTES] for block_hash in asked.hashes)
    return [asked.at_s, asked.namespace, asked.tokens, asked.block_tokens, asked.own, names]
