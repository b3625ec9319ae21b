"""Block tables of vLLM's as pages of the store's blocks."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.engines.vllm_layout import CacheGroup
from tierkv.engines.vllm_messages import PageTable
from tierkv.layout import GroupKind, Layout


class Tables:
    """``null_block``: what vLLM writes where it keeps no page, behind a window. Immutable."""

    def __init__(self, layout: Layout, groups: Sequence[CacheGroup], null_block: int) -> None:
        self.layout = layout
        self._groups = groups
        self._null = null_block
        self._pages = [layout.pages_of(number) for number in range(len(groups))]

    def of(self, tables: Sequence[Sequence[int]], first: int, last: int) -> PageTable:
        """``()`` for a group of which the engine holds no page of the block (any more)."""
        return tuple(
            tuple(self._of_group(tables, block, number) for number in range(len(self._groups)))
            for block in range(first, last)
        )

    def _of_group(self, tables: Sequence[Sequence[int]], block: int, number: int) -> tuple[int, ...]:
        size = self._pages[number]
        pages = tuple(tables[self._groups[number].table][block * size : (block + 1) * size])
        if len(pages) < size or all(page == self._null for page in pages):
            return ()
        return pages

    def absent(self, pages: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
        """The groups that a block will be stored without; ``None`` when it cannot be stored so."""
        absent = tuple(number for number, its in enumerate(pages) if not its or self._null in its)
        if any(self._groups[number].kind is GroupKind.FULL for number in absent):
            return None
        return absent

    def cut(self, tables: Sequence[Sequence[int]], blocks: int) -> tuple[list[int], ...]:
        """The block tables as far as so many blocks of the store go."""
        longest = {group.table: 0 for group in self._groups}
        for number, group in enumerate(self._groups):
            longest[group.table] = max(longest[group.table], blocks * self._pages[number])
        return tuple(list(table[: longest.get(index, 0)]) for index, table in enumerate(tables))

    def behind(self, tables: Sequence[Sequence[int]], tokens: int) -> list[int]:
        """The pages behind so many leading tokens."""
        own = {group.table: tokens // group.block_tokens for group in self._groups}
        return [page for index, table in enumerate(tables) for page in table[own.get(index, 0) :]]
