"""Makes any policy take what hangs from a block before the block.

A block without its parent cannot be found, so evicting a head first wastes all that is behind it (SIEVE on agentic
traffic at 1 % of the blocks: 3 % hits, and 70 % with this). Where the policy wants a block gone that has children, its
descendants go first, the deepest of them and the newest branch at the front; so no search for a leaf is ever needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tierkv.ids import FamilyId
from tierkv.policies.ordered import OrderedPolicy, offered
from tierkv.policy import BlockInfo


class LeafFirst:
    """A policy around an ``OrderedPolicy``. Memory: some 150 bytes for each family beside what that one takes. Not
    thread-safe: the store calls it under its lock."""

    name: str

    def __init__(self, inner: OrderedPolicy) -> None:
        self.inner = inner
        self.name = inner.name
        self._parent: dict[int, int] = {}
        self._children: dict[int, dict[int, None]] = {}

    def __len__(self) -> int:
        """Resident families."""
        return len(self.inner)

    def on_insert(self, infos: Sequence[BlockInfo]) -> None:
        for info in infos:
            if self.inner.knows(info.id):
                self._unhang(info.id)
        self.inner.on_insert(infos)
        for info in infos:
            if info.parent is not None and self.inner.knows(info.parent):
                self._parent[info.id] = info.parent
                self._children.setdefault(info.parent, {})[info.id] = None

    def on_hit(self, ids: Sequence[FamilyId]) -> None:
        self.inner.on_hit(ids)

    def on_remove(self, ids: Sequence[FamilyId], *, evicted: bool) -> None:
        self.inner.on_remove(ids, evicted=evicted)
        for ident in ids:
            self._unhang(ident)

    def _unhang(self, ident: int) -> None:
        for child in self._children.pop(ident, ()):
            del self._parent[child]
        parent = self._parent.pop(ident, None)
        if parent is not None:
            siblings = self._children[parent]
            del siblings[ident]
            if not siblings:
                del self._children[parent]

    def victims(self, need: int, evictable: Callable[[FamilyId], bool]) -> Iterator[FamilyId]:
        return offered(self._order(), need, evictable)

    def _order(self) -> Iterator[int]:
        given: set[int] = set()
        children = self._children
        for wanted in self.inner.order():
            if wanted in given:
                continue
            if wanted not in children:
                given.add(wanted)
                yield wanted
                continue
            line = [wanted]
            while line:
                deepest = line[-1]
                below = next((one for one in reversed(children.get(deepest, {})) if one not in given), None)
                if below is not None:
                    line.append(below)
                    continue
                given.add(line.pop())
                yield deepest

    def counters(self) -> Mapping[str, int]:
        return self.inner.counters()
