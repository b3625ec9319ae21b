"""What people and their tools may ask a daemon, and how they say it: JSON in, JSON out, the same over HTTP and over the
daemon's own socket (for the command line).

A prompt is given as ``tokens`` (ids) or as ``hashes`` (its blocks' hashes, hex or base64), under a ``namespace``: the
hex of its digest, or enough of its beginning. What is wrong in a question is a ``QuestionError`` that says where.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tierkv.errors import TierKVError
from tierkv.keys import Adapter, Extras

T = TypeVar("T")
MOST_BLOCKS = 262_144
MOST_TOKENS = 2_097_152
LEAST_DIGITS = 8
"""Of a namespace's digest; fewer could be anybody's."""
MOST_WAIT_S = 600.0

_HEX = re.compile(r"[0-9a-fA-F]{64}")


class QuestionError(TierKVError):
    """The question cannot be understood."""


class NotThere(TierKVError):
    """What was asked about is not here."""


@dataclass(frozen=True)
class Prompt:
    """What names blocks in a question: ``tokens``, or else ``hashes``."""

    namespace: str
    tokens: Sequence[int] | None
    hashes: Sequence[bytes] | None
    extras: Extras


def parse(body: bytes, allowed: frozenset[str]) -> dict[str, Any]:
    """A JSON object with none but the allowed words; nothing at all counts as an empty one."""
    try:
        words = json.loads(body or b"{}", parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise QuestionError(f"this is no JSON: {error}") from None
    if not isinstance(words, dict):
        raise QuestionError(f"a JSON object is expected, and this is a {type(words).__name__}")
    unknown = words.keys() - allowed
    if unknown:
        raise QuestionError(
            f"{min(unknown)!r} is not known here; there are {', '.join(sorted(allowed)) or 'no words'}"
        )
    return words


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def prompt_of(words: Mapping[str, Any]) -> Prompt:
    namespace = needed(words, "namespace", str)
    if "tokens" in words and "hashes" in words:
        raise QuestionError("give tokens or hashes, not both")
    if "tokens" in words:
        return Prompt(namespace, _tokens(words["tokens"]), None, _extras(words))
    if "hashes" in words:
        if words.get("adapter") is not None or words.get("cache_salt") is not None:
            raise QuestionError("the hashes of blocks hold adapter and cache_salt already; leave these out")
        return Prompt(namespace, None, _hashes(words["hashes"]), Extras())
    raise QuestionError("a prompt is missing: give its tokens, or the hashes of its blocks")


def needed(words: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = words.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise QuestionError(f"{name} = {_short(value)}: {_called(kind)} is needed")
    return value


def optional(words: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    return None if words.get(name) is None else needed(words, name, kind)


def seconds(words: Mapping[str, Any], name: str, most_s: float) -> float | None:
    value = words.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most_s:
        raise QuestionError(f"{name} = {_short(value)}: seconds from 0 to {most_s:g} are expected")
    return float(value)


def _tokens(value: object) -> Sequence[int]:
    if not isinstance(value, list):
        raise QuestionError("tokens: a list of token ids is expected, such as [1, 2, 3]")
    if not all(type(token) is int for token in value):
        value = [_whole(token) for token in value]
    if len(value) > MOST_TOKENS:
        raise QuestionError(f"{len(value)} tokens: at most {MOST_TOKENS} are taken")
    return value


def _whole(token: object) -> int:
    """JSON does not tell 1.0 from 1."""
    if type(token) is int:
        return token
    if type(token) is float and token.is_integer():
        return int(token)
    raise QuestionError("tokens: a list of token ids is expected, such as [1, 2, 3]")


def _hashes(value: object) -> Sequence[bytes]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise QuestionError("hashes: a list of the blocks' hashes is expected, each in hex or base64")
    if len(value) > MOST_BLOCKS:
        raise QuestionError(f"{len(value)} hashes: at most {MOST_BLOCKS} are taken")
    return [_hash(position, text) for position, text in enumerate(value)]


def _hash(position: int, text: str) -> bytes:
    if _HEX.fullmatch(text):
        return bytes.fromhex(text)
    try:
        found = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_" if set(text) & set("-_") else None,
                                 validate=True)  # fmt: skip
    except (binascii.Error, ValueError):
        raise QuestionError(f"hashes[{position}] = {_short(text)} is neither hex nor base64") from None
    if len(found) != 32:
        raise QuestionError(f"hashes[{position}] has {len(found)} bytes; the hash of a block has 32")
    return found


def _extras(words: Mapping[str, Any]) -> Extras:
    adapter = optional(words, "adapter", dict)
    salt = optional(words, "cache_salt", str)
    named = None
    if adapter is not None:
        named = Adapter(needed(adapter, "name", str), needed(adapter, "revision", str))
    return Extras(adapter=named, cache_salt=salt)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _called(kind: type) -> str:
    return {str: "text", int: "a whole number", dict: "an object", list: "a list", bool: "true or false"}.get(
        kind, kind.__name__
    )
