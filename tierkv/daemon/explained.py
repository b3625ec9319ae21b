"""Explanations in messages: said by the daemon, understood by the client as the same types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierkv.differences import Difference
from tierkv.explanation import BlockFate, Cause, Explanation, Left, Twin
from tierkv.ids import BlockHash, NamespaceDigest


def say_explanation(told: Explanation) -> dict[str, Any]:
    first = told.first_missing
    return {
        "blocks": told.blocks,
        "usable": told.usable,
        "tokens": told.tokens,
        "first_missing": None if first is None else _say_fate(first),
        "causes": {cause.name: count for cause, count in told.causes.items()},
        "twins": [
            [twin.namespace, [list(one) for one in twin.differs], twin.usable, _say_left(twin.left)]
            for twin in told.twins
        ],
        "notes": list(told.notes),
    }


def hear_explanation(words: Mapping[str, Any]) -> Explanation:
    first = words["first_missing"]
    return Explanation(
        blocks=words["blocks"],
        usable=words["usable"],
        tokens=words["tokens"],
        first_missing=None if first is None else _hear_fate(first),
        causes={Cause[name]: count for name, count in words["causes"].items()},
        twins=tuple(_hear_twin(*twin) for twin in words["twins"]),
        notes=tuple(words["notes"]),
    )


def _say_fate(fate: BlockFate) -> list[Any]:
    return [
        fate.position,
        fate.block_hash,
        fate.cause.name,
        fate.detail,
        [_say_left(one) for one in fate.left],
    ]


def _hear_fate(words: list[Any]) -> BlockFate:
    position, block_hash, cause, detail, left = words
    gone = tuple(one for one in map(_hear_left, left) if one is not None)
    return BlockFate(position, BlockHash(block_hash), Cause[cause], detail, gone)


def _say_left(left: Left | None) -> list[Any] | None:
    return None if left is None else [left.tier, left.reason, left.age_s, list(left.missing)]


def _hear_left(words: list[Any] | None) -> Left | None:
    if words is None:
        return None
    tier, reason, age_s, missing = words
    return Left(tier, reason, age_s, tuple(missing))


def _hear_twin(namespace: bytes, differs: list[list[str]], usable: bool, left: list[Any] | None) -> Twin:
    differences = tuple(Difference(*one) for one in differs)
    return Twin(NamespaceDigest(namespace), differences, usable, _hear_left(left))
