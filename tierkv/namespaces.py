"""A namespace as a client holds it: named, declared, with the ranks that live on this host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierkv.errors import LayoutError
from tierkv.ids import NamespaceDigest
from tierkv.index import FamilyIndex, Space
from tierkv.keys import Chain, Extras, Namespace
from tierkv.layout import GroupKind


class OpenNamespace:
    """A namespace that the store has opened, with the ranks that live on this host."""

    def __init__(self, namespace: Namespace, space: Space, ranks: tuple[int, ...]) -> None:
        self.namespace = namespace
        self.space = space
        self.ranks = ranks
        self._parts: dict[int, tuple[int, ...]] = {}

    def chain(
        self,
        tokens: Any = None,
        *,
        engine_hashes: Sequence[bytes] | None = None,
        num_tokens: int | None = None,
        extras: Extras | None = None,
    ) -> Chain:
        """See ``tierkv.keys.Namespace.chain``."""
        known = extras if extras is not None else Extras()
        return self.namespace.chain(tokens, engine_hashes=engine_hashes, num_tokens=num_tokens, extras=known)

    def parts_of(self, rank: int, absent: Sequence[int] = ()) -> tuple[int, ...]:
        """The parts that a rank holds, in the order of the layer groups, without the groups in ``absent``."""
        if not absent and rank in self._parts:
            return self._parts[rank]
        layout = self.namespace.layout
        if rank not in self.ranks and 0 <= rank < layout.ranks:
            raise LayoutError(
                f"rank = {rank}: the namespace was opened for the ranks {list(self.ranks)} of this host"
            )
        groups = [group for group in range(len(layout.groups)) if group not in absent]
        parts = tuple(layout.part_index(group, rank) for group in groups)
        if not absent:
            self._parts[rank] = parts
        return parts

    def expected(self, absent: Sequence[int] = ()) -> int:
        """Bitmap of the parts that make a block whole on this host. Raises ``LayoutError`` for an absent group that
        nothing can do without."""
        if not absent:
            return self.space.expected
        layout = self.namespace.layout
        for group in absent:
            if not 0 <= group < len(layout.groups):
                raise LayoutError(
                    f"absent = {group}: the layout has {len(layout.groups)} layer groups, from 0 on"
                )
            if layout.groups[group].kind is GroupKind.FULL:
                raise LayoutError(
                    f"layer group {layout.groups[group].name!r}: full attention needs every block"
                )
        return self.space.expected & ~sum(layout.group_mask(group) for group in set(absent))


def opened_by_others(index: FamilyIndex, digest: bytes) -> OpenNamespace | None:
    """The namespace as it was opened in a store, whoever did it; ``None`` when only a restart knows of it."""
    space = index.space(NamespaceDigest(digest))
    if space is None or space.namespace is None:
        return None
    layout = space.namespace.layout
    ranks = (rank for rank in range(layout.ranks) if not layout.mask_of((rank,)) & ~space.expected)
    return OpenNamespace(space.namespace, space, tuple(ranks))
