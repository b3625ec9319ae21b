"""Adapters (LoRA) by their content: vLLM's hashes know an adapter's name and path, not what its files hold.

The revision is a digest of the files as they are when the engine loads them. When they differ later without a word
that the engine has loaded them again (``load_inplace``, another id), nobody knows which content computes, and
nothing of the adapter is stored or found until there is one.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tierkv.digest import default_cache_folder, digest_of
from tierkv.errors import IdentityError
from tierkv.keys import Adapter

MOST_ADAPTERS = 4096
"""Names that are remembered; the oldest is forgotten."""


Stamp = tuple[tuple[str, int, int, int, int], ...]
"""Path, size, times and inode of each file."""


class AdapterUse(NamedTuple):
    """An adapter as a request names it."""

    name: str
    path: str
    number: int
    """The engine's id for it."""
    reloads: bool
    """The engine reads its files for this request."""


@dataclass
class _Known:
    number: int
    stamp: Stamp
    content: str
    """A digest of what the engine has loaded."""
    revision: str | None
    changed: bool = False
    """It was another one before, in this engine: what the engine's own cache has of it may be stale."""


class Adapters:
    """Of one engine. Reads files, so it is for a thread that may wait. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], _Known] = {}

    def of(self, use: AdapterUse) -> tuple[Adapter, bool]:
        """The adapter with its revision (``None``: nothing of it may be stored), and whether it was changed in
        place."""
        name = (use.name, use.path)
        with self._lock:
            known = self._known.get(name)
            try:
                stamp = _stamp_of(Path(use.path))
                if known is None:
                    content = _digest(use.path)
                    known = self._known[name] = _Known(use.number, stamp, content, content)
                    if len(self._known) > MOST_ADAPTERS:
                        self._known.pop(next(iter(self._known)))
                elif known.stamp != stamp:
                    self._changed(known, use, stamp)
            except (OSError, IdentityError):
                return Adapter(use.name, None), False
            return Adapter(use.name, known.revision), known.changed

    def _changed(self, known: _Known, use: AdapterUse, stamp: Stamp) -> None:
        content = _digest(use.path)
        if content == known.content:  # only touched, or copied to the same place
            known.stamp = stamp
            return
        loaded = use.reloads or use.number != known.number
        known.revision = content if loaded else None
        known.changed = True
        if loaded:
            known.stamp, known.content, known.number = stamp, content, use.number


def _digest(path: str) -> str:
    return digest_of(path, cache_folder=default_cache_folder())


def _stamp_of(root: Path) -> Stamp:
    """What changes when a file does: the time of its last change too, since two adapters often have the same size, and
    who copies one over the other may keep the other times. Raises ``OSError``."""
    paths = [os.path.join(folder, file) for folder, _, files in os.walk(root) for file in files]
    found = []
    for path in paths or [str(root)]:
        facts = os.stat(path)
        found.append((path, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino))
    return tuple(sorted(found))
