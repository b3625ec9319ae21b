"""Why this was a miss: looks at the index, at what has left, at the tiers, and at the same prompt under other names.

For people and for ``tierkv explain``, not for an engine's step: it takes milliseconds, and asks no server. What it says
of a prompt under other namespaces and salts is an operator's knowledge: a daemon must not tell it to a tenant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierkv.catalog import HOST, LOCK_BATCH
from tierkv.departures import NOT_TAKEN, Departure
from tierkv.differences import differences
from tierkv.errors import IdentityError
from tierkv.explanation import FINE, BlockFate, Cause, Explanation, Left, Twin, cause_of
from tierkv.guard import trouble_of
from tierkv.ids import BlockHash, FamilyId
from tierkv.index import USABLE, Space
from tierkv.keys import Adapter, Chain, Extras, Namespace

if TYPE_CHECKING:
    from tierkv.store import TieredStore

_MOST_TWINS = 4
_MOST_SPACES = 1024
"""Namespaces under which the beginning of a prompt is looked for, the last opened ones."""


class _Row(NamedTuple):
    """What the index knew of a block at one moment."""

    family: FamilyId
    usable: bool
    expired: bool
    whole_in: int
    held_in_host: int
    expected: int


class Explainer:
    """Explains one chain. Thread-safe; looks at the catalog 256 blocks at a time, so it may see it change."""

    def __init__(self, store: TieredStore, space: Space, chain: Chain, adapters: Iterable[Adapter]) -> None:
        self._store = store
        self._catalog = store.catalog
        self._space = space
        self._chain = chain
        self._adapters = tuple(adapters)
        self._now_s = store.clock.now_s()
        ready = (1 << number for number, edge in store.edges.items() if edge.tier.breaker.ready())
        self._ready = sum(ready)

    def explain(self, usable_blocks: int | None) -> Explanation:
        """``usable_blocks``: how many an engine could go on from, by the layout's rules, of those that are there."""
        rows = self._rows()
        left = self._catalog.departures.find(self._names(rows))
        fates = list(self._fates(rows, left))
        run = next((i for i, (cause, _) in enumerate(fates) if cause not in FINE), len(fates))
        usable = run if usable_blocks is None else min(run, usable_blocks)
        causes: Counter[Cause] = Counter()
        for position, (cause, _) in enumerate(fates):
            if cause in FINE and position >= usable:
                cause = Cause.NOT_ENOUGH if position < run else Cause.BEHIND
            causes[cause] += 1
        first = None
        if usable < run:
            first = BlockFate(usable, self._hash(usable), Cause.NOT_ENOUGH, self._lacking(rows[usable:run]))
        elif run < len(fates):
            cause, detail = fates[run]
            gone = self._left(left.get((self._space.number, self._hash(run)), ()))
            first = BlockFate(run, self._hash(run), cause, detail or self._branches(run, cause), gone)
        block_tokens = self._chain.namespace.layout.block_tokens
        tokens = max(0, min(usable * block_tokens, self._chain.num_tokens - 1))
        twins = tuple(self._twins()) if fates and run == 0 else ()
        return Explanation(len(fates), usable, tokens, first, causes, twins, tuple(self._notes()))

    def _hash(self, position: int) -> BlockHash:
        return self._chain.hashes[position]

    # -- the chain's own blocks -----------------------------------------------------------------------------------

    def _rows(self) -> list[_Row | None]:
        catalog, rows = self._catalog, []
        for start in range(0, len(self._chain), LOCK_BATCH):
            with catalog.gate, catalog.lock:
                for block_hash in self._chain.hashes[start : start + LOCK_BATCH]:
                    family = self._space.get(block_hash)
                    rows.append(None if family is None else self._row(family))
        return rows

    def _row(self, family: FamilyId) -> _Row:
        index = self._catalog.index
        return _Row(
            family,
            bool(index.state[family] & USABLE),
            0 < index.expires_s[family] <= self._now_s,
            index.whole_in[family],
            index.residency[HOST][family],
            index.expected[family],
        )

    def _names(self, rows: Sequence[_Row | None]) -> list[tuple[int, bytes]]:
        """The blocks that are not to be had, as the memory of departures names them."""
        number = self._space.number
        return [
            (number, block_hash)
            for block_hash, row in zip(self._chain.hashes, rows, strict=True)
            if row is None or not row.usable
        ]

    def _fates(
        self, rows: Sequence[_Row | None], left: dict[tuple[int, bytes], list[Departure]]
    ) -> Iterator[tuple[Cause, str]]:
        pending = {
            blocks.chain.hashes[position]
            for blocks in list(self._store.intake.under_way.values())
            if blocks.chain.namespace == self._chain.namespace
            for position in blocks.positions
        }
        deaf = self._deaf()
        for block_hash, row in zip(self._chain.hashes, rows, strict=True):
            gone = left.get((self._space.number, block_hash))
            if row is not None and row.usable:
                yield self._there(row)
            elif row is not None and row.held_in_host:
                missing = ", ".join(self._parts(row.expected & ~row.held_in_host))
                yield Cause.INCOMPLETE, f"missing: {missing}"
            elif block_hash in pending:
                yield Cause.PENDING, ""
            elif gone:
                yield cause_of(gone[0]), ""
            elif deaf:
                yield Cause.UNAVAILABLE, f"not known here, and {deaf} cannot be asked"
            else:
                yield Cause.NEVER_STORED, ""

    def _there(self, row: _Row) -> tuple[Cause, str]:
        if row.expired:
            return Cause.EXPIRED, "its time is over"
        if row.whole_in >> HOST & 1:
            return Cause.IN_HOST, ""
        tiers = ", ".join(tier.name for tier in self._catalog.tiers if row.whole_in >> tier.number & 1)
        return (Cause.COLDER if row.whole_in & self._ready else Cause.UNAVAILABLE), f"in {tiers}"

    def _deaf(self) -> str | None:
        """The tier whose content others change, when it cannot be asked."""
        for number, edge in self._store.edges.items():
            if edge.tier.caps.evicts_itself and not self._ready >> number & 1:
                return edge.name
        return None

    def _parts(self, mask: int) -> Iterator[str]:
        layout = self._chain.namespace.layout
        for part in layout.parts:
            if mask >> part.index & 1:
                rank = "" if part.rank is None or layout.ranks == 1 else f" of rank {part.rank}"
                yield f"layer group {layout.groups[part.group].name!r}{rank}"

    def _lacking(self, rows: Sequence[_Row | None]) -> str:
        """Which groups an engine lacks in order to go on behind these blocks, which are there."""
        layout = self._chain.namespace.layout
        known = [row.expected for row in rows if row is not None]
        lacking = [
            repr(layout.groups[group].name)
            for group in range(len(layout.groups))
            if layout.trailing_blocks(group) is not None
            and any(not expected & layout.group_mask(group) for expected in known)
        ]
        if lacking:
            return f"stored without what layer group {', '.join(lacking)} needs at its end"
        return "the last token must be computed, and a state cannot go back by one"

    def _branches(self, position: int, cause: Cause) -> str:
        """How many other ways there are on from the last block that is there."""
        if not position or cause is not Cause.NEVER_STORED:
            return ""
        with self._catalog.gate, self._catalog.lock:
            parent = self._space.get(self._hash(position - 1))
            others = self._catalog.index.children_known[parent] if parent is not None else 0
        return f"{others} other ways on from the block before it are stored" if others else ""

    def _left(self, departures: Sequence[Departure]) -> tuple[Left, ...]:
        """The last departure from each tier."""
        last: dict[int, Departure] = {}
        for one in departures:
            last.setdefault(one.tier, one)
        return tuple(map(self._told, last.values()))

    def _told(self, one: Departure) -> Left:
        tier = None if one.tier == NOT_TAKEN else self._catalog.tiers[one.tier].name
        missing: tuple[str, ...] = ()
        if one.reason == "incomplete":
            missing = tuple(self._parts(self._space.expected & ~one.parts))
        return Left(tier, one.reason, max(0.0, self._now_s - one.at_s), missing)

    # -- the same prompt under other names ------------------------------------------------------------------------

    def _twins(self) -> Iterator[Twin]:
        """Other names under which the first block is stored, or was."""
        mine = self._chain.namespace
        own = self._chain.opening.extras if self._chain.opening is not None else Extras()
        names: dict[tuple[int, bytes], tuple[Space, Namespace, Extras]] = {}
        for space, namespace, extras in self._other_names(own):
            first = self._first_hash(namespace, extras)
            if first is not None and (space is not self._space or first != self._hash(0)):
                names.setdefault((space.number, first), (space, namespace, extras))
        left = self._catalog.departures.find(names)
        found = 0
        for (number, block_hash), (space, namespace, extras) in names.items():
            family = space.get(block_hash)
            usable = family is not None and bool(self._catalog.index.state[family] & USABLE)
            gone = left.get((number, block_hash))
            if not usable and not gone:
                continue
            differs = (*differences(mine.spec, namespace.spec), *differences(own, extras))
            told = self._told(gone[0]) if gone and not usable else None
            yield Twin(namespace.digest, differs, usable, told)
            found += 1
            if found == _MOST_TWINS:
                return

    def _other_names(self, own: Extras) -> Iterator[tuple[Space, Namespace, Extras]]:
        for space in reversed(list(self._catalog.index.spaces)[-_MOST_SPACES:]):
            if space.namespace is not None and space is not self._space:
                yield space, space.namespace, own
        mine = self._chain.namespace
        for adapter in (None, *self._adapters):
            yield self._space, mine, replace(own, adapter=adapter)
        for fewer in (
            replace(own, cache_salt=None),
            replace(own, prompt_embeds_hash=None),
            replace(own, multimodal=()),
            Extras(),
        ):
            yield self._space, mine, fewer

    def _first_hash(self, namespace: Namespace, extras: Extras) -> BlockHash | None:
        """The name of the first block there; ``None`` when it cannot be told."""
        opening = self._chain.opening
        if opening is None:
            return self._hash(0) if namespace.spec.hash_scheme != "tokens" else None
        try:
            if opening.tokens is not None:
                tokens = np.frombuffer(opening.tokens, "<i4")[: namespace.layout.block_tokens]
                chain = namespace.chain(tokens, extras=extras)
            else:
                hashes = opening.engine_hashes[: namespace.layout.engine_blocks]
                chain = namespace.chain(engine_hashes=hashes, extras=extras)
        except IdentityError:  # the other namespace takes hashes of another kind
            return None
        return chain.hashes[0] if chain.hashes else None

    def _notes(self) -> Iterator[str]:
        if self._chain.uncacheable is not None:
            yield f"the rest of the prompt must not be cached: {self._chain.uncacheable}"
        elif not len(self._chain):
            block_tokens = self._chain.namespace.layout.block_tokens
            yield f"the prompt has no full block: {self._chain.num_tokens} tokens, a block has {block_tokens}"
        for number, edge in self._store.edges.items():
            trouble = trouble_of(edge.tier.status())
            why = f" ({trouble})" if trouble else ""
            if not self._ready >> number & 1:
                yield f"{edge.name} does not answer and is left alone for now{why}"
            elif edge.tier.caps.evicts_itself:
                yield f"{edge.name} may hold more than is known here: it was not asked"
                if trouble:
                    yield f"{edge.name} had trouble when it was last asked{why}"
        unknown = sum(1 for space in self._catalog.index.spaces if space.namespace is None and len(space))
        if unknown:
            yield f"{unknown} namespaces from before the last start hold blocks and were not opened again"
