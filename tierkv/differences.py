"""Which fields of two namespaces differ, in words: why the bytes of one are none of the other's business."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import NamedTuple

from tierkv.keys import Extras, NamespaceSpec

_SECRET = frozenset({"salt", "cache_salt"})
_LONGEST = 60


class Difference(NamedTuple):
    """One field. Values are in words, cut to a readable length; a salt's is never shown."""

    field: str
    """Its path: ``"layout.groups.full.page_bytes"``."""
    here: str
    there: str

    def __str__(self) -> str:
        if self.field.rpartition(".")[2] in _SECRET:
            return f"{self.field} (not shown)"
        return f"{self.field}: {self.here} here, {self.there} there"


def differences(
    here: NamespaceSpec | Extras, there: NamespaceSpec | Extras, path: str = ""
) -> list[Difference]:
    """All fields in which the two differ, in the order of their declaration; layer groups are compared by name."""
    return list(_walk(path, here, there))


def _walk(path: str, here: object, there: object) -> Iterator[Difference]:
    if here == there:
        return
    if type(here) is not type(there) or not _has_parts(here):
        yield Difference(path, *_shown(path, here, there))
        return
    mine, theirs = _parts(here), _parts(there)
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        below = f"{path}.{name}" if path else name
        if name in mine and name in theirs:
            yield from _walk(below, mine[name], theirs[name])
        else:
            yield Difference(below, *("there is one" if name in one else "none" for one in (mine, theirs)))


def _has_parts(value: object) -> bool:
    return is_dataclass(value) or (isinstance(value, tuple) and bool(value))


def _parts(value: object) -> dict[str, object]:
    if isinstance(value, tuple):
        return {str(getattr(one, "name", number)): one for number, one in enumerate(value)}
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init}  # type: ignore[arg-type]


def _shown(path: str, *values: object) -> list[str]:
    if path.rpartition(".")[2] in _SECRET:
        return ["not shown" if value is not None else "none" for value in values]
    words = [
        "none" if value is None else str(value.value) if isinstance(value, Enum) else repr(value)
        for value in values
    ]
    return [word if len(word) <= _LONGEST else word[: _LONGEST - 3] + "..." for word in words]
