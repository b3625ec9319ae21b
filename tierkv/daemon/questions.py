"""What people and their tools may ask a daemon, and how they say it: JSON in, JSON out, the same over HTTP and over the
daemon's own socket (for the command line).

A prompt is given as ``tokens`` (ids) or as ``hashes`` (its blocks' hashes, hex or base64), under a ``namespace``: the
hex of its digest, or enough of its beginning. What is wrong in a question is a ``QuestionError`` that names the word,
what it holds (a salt is never told) and what is expected.
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
_SECRET = frozenset({"cache_salt", "tenant_salt"})
A_NAMESPACE = (
    f"the hex of a namespace's digest, or at least its first {LEAST_DIGITS} digits (status lists them)"
)
_TOKENS = "a list of token ids, whole numbers such as [1, 2, 3],"
_HASHES = "a list of the blocks' hashes, each in hex or base64,"


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
        raise QuestionError(
            f"the body, {len(body)} bytes, is no JSON: {error}; an object with {_all(allowed)} is expected"
        ) from None
    if not isinstance(words, dict):
        raise QuestionError(f"the body is {_kind_of(words)}: a JSON object with {_all(allowed)} is expected")
    unknown = words.keys() - allowed
    if unknown:
        raise QuestionError(f"{_short(min(unknown))} is not known here; there are {_all(allowed)}")
    return words


def _all(allowed: frozenset[str]) -> str:
    return ", ".join(sorted(allowed)) or "no words"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def prompt_of(words: Mapping[str, Any]) -> Prompt:
    namespace = needed(words, "namespace", str, A_NAMESPACE)
    if "tokens" in words and "hashes" in words:
        raise QuestionError("tokens and hashes are both given: one of them is expected")
    if "tokens" in words:
        return Prompt(namespace, _tokens(words["tokens"]), None, _extras(words))
    if "hashes" in words:
        for name in ("adapter", "cache_salt"):
            if words.get(name) is not None:
                raise QuestionError(f"{name} is given beside hashes, which hold it already; leave it out")
        return Prompt(namespace, None, _hashes(words["hashes"]), Extras())
    raise QuestionError(
        "tokens and hashes are missing: a prompt is expected, as the list of its token ids or of its blocks' hashes"
    )


def needed(words: Mapping[str, Any], name: str, kind: type[T], what: str = "", inside: str = "") -> T:
    """``what`` is expected, by default anything of that kind; ``inside`` is the word that holds these words."""
    what, called = what or _called(kind), f"{inside}{name}"
    if name not in words:
        raise QuestionError(f"{called} is missing: {what} is expected")
    value = words[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        told = "***" if name in _SECRET else _short(value)
        raise QuestionError(f"{called} = {told}: {what} is expected")
    return value


def optional(words: Mapping[str, Any], name: str, kind: type[T], what: str = "") -> T | None:
    return None if words.get(name) is None else needed(words, name, kind, what)


def seconds(words: Mapping[str, Any], name: str, most_s: float) -> float | None:
    value = words.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most_s:
        raise QuestionError(f"{name} = {_short(value)}: seconds from 0 to {most_s:g} are expected")
    return float(value)


def _tokens(value: object) -> Sequence[int]:
    if not isinstance(value, list):
        raise QuestionError(f"tokens = {_short(value)}: {_TOKENS} is expected")
    if len(value) > MOST_TOKENS:
        raise QuestionError(f"tokens has {len(value)} entries: at most {MOST_TOKENS} are taken")
    if not all(type(token) is int for token in value):
        value = [_whole(position, token) for position, token in enumerate(value)]
    return value


def _whole(position: int, token: object) -> int:
    """JSON does not tell 1.0 from 1."""
    if type(token) is int:
        return token
    if type(token) is float and token.is_integer():
        return int(token)
    raise QuestionError(f"tokens[{position}] = {_short(token)}: {_TOKENS} is expected")


def _hashes(value: object) -> Sequence[bytes]:
    if not isinstance(value, list):
        raise QuestionError(f"hashes = {_short(value)}: {_HASHES} is expected")
    if len(value) > MOST_BLOCKS:
        raise QuestionError(f"hashes has {len(value)} entries: at most {MOST_BLOCKS} are taken")
    return [_hash(position, text) for position, text in enumerate(value)]


def _hash(position: int, text: object) -> bytes:
    if not isinstance(text, str):
        raise QuestionError(f"hashes[{position}] = {_short(text)}: {_HASHES} is expected")
    if _HEX.fullmatch(text):
        return bytes.fromhex(text)
    try:
        found = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_" if set(text) & set("-_") else None,
                                 validate=True)  # fmt: skip
    except (binascii.Error, ValueError):
        raise QuestionError(
            f"hashes[{position}] = {_short(text)} is neither hex nor base64: {_HASHES} is expected"
        ) from None
    if len(found) != 32:
        raise QuestionError(
            f"hashes[{position}] = {_short(text)} has {len(found)} bytes: the hash of a block has 32"
        )
    return found


def _extras(words: Mapping[str, Any]) -> Extras:
    adapter = optional(words, "adapter", dict)
    salt = optional(words, "cache_salt", str)
    named = None
    if adapter is not None:
        named = Adapter(*(needed(adapter, word, str, inside="adapter.") for word in ("name", "revision")))
    return Extras(adapter=named, cache_salt=salt)


def _kind_of(value: object) -> str:
    return "nothing (null)" if value is None else _called(type(value))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _called(kind: type) -> str:
    return {
        str: "text", int: "a whole number", float: "a number", dict: "an object", list: "a list", bool: "true or false"
    }[kind]  # fmt: skip
