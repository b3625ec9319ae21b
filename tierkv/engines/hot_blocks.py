"""Hot blocks stay in the GPU's memory: what host RAM would have to send again and again is copied within the device.

For engines that keep no prefixes of their own. A copy here is one more of a block that host RAM has leased, never
the only one, and it stands for the very slots that it was copied from: so what the store clears, evicts, renames or
finds damaged is never served from here, also when a block of that name comes again. Which blocks are worth it, an
admission policy says (by default those that are onboarded a second time), and who leaves, an eviction policy: the
store's own ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tierkv.any_copier import AnyCopier
from tierkv.copier import ENGINE_ERRORS, Copier, CopyPart, PagedKV
from tierkv.executor import deliver
from tierkv.handles import Lease
from tierkv.ids import FamilyId, Slot
from tierkv.layout import Layout
from tierkv.policies.lru import LruPolicy
from tierkv.policies.seen_twice import SeenTwicePolicy
from tierkv.policy import AdmissionPolicy, BlockInfo, EvictionPolicy, Verdict
from tierkv.tiers.hbm import HbmTier
from tierkv.units import ALIGN_BYTES

if TYPE_CHECKING:
    from tierkv.client import Client
    from tierkv.daemon.remote import RemoteClient

Name = tuple[bytes, bytes]
"""(namespace digest, block hash)."""

Pages = Sequence[Sequence[Sequence[int]]]

Source = tuple[bytes, tuple[tuple[int, int], ...]]
"""Of which memory, and which slots of it with their generations: no two blocks that ever were in host RAM share it."""

_PROMOTIONS = 64
"""Blocks on their way in at once, at most: the pages that they come from must stand still as long."""


@dataclass(eq=False)
class _Hot:
    """A block with its slot for each layer group."""

    id: FamilyId
    name: Name
    source: Source
    slots: dict[int, Slot]
    size_bytes: int
    readers: int = 0
    here: bool = False
    """All of its bytes have come."""


@dataclass
class HotCounts:
    """Blocks, since the start."""

    served: int = 0
    promoted: int = 0
    evicted: int = 0
    failed: int = 0
    served_bytes: int = field(default=0)


class HotBlocks:
    """Thread-safe; calls return at once. ``copier`` moves bytes on the device, ``tier`` has the slots."""

    def __init__(
        self,
        tier: HbmTier,
        copier: Copier,
        *,
        eviction: EvictionPolicy | None = None,
        admission: AdmissionPolicy | None = None,
    ) -> None:
        self.tier = tier
        self.counts = HotCounts()
        self._copier = copier
        self._eviction = eviction or LruPolicy()
        self._admission = admission or SeenTwicePolicy()
        self._lock = threading.Lock()
        self._by_name: dict[Name, _Hot] = {}
        self._by_id: dict[FamilyId, _Hot] = {}
        self._free_ids: list[FamilyId] = []
        self._promoting = 0

    def onboard(self, client: Client | RemoteClient, lease: Lease, kv: PagedKV, pages: Pages) -> Future[bool]:
        """``client.onboard`` of a lease into the engine's pages, for blocks of one rank: those that are here come
        from here, the others from host RAM. The pages must stand still until they are given up by the engine for
        good."""
        blocks = min(len(lease), len(pages))
        names = [(lease.chain.namespace.digest, block_hash) for block_hash in lease.chain.hashes[:blocks]]
        sources = _sources(lease, blocks)
        hot = self._take(lease.chain.namespace.layout, names, sources, pages)
        cold = [[()] * len(block) if i in hot else block for i, block in enumerate(pages[: len(lease)])]
        begun = False
        try:
            from_host = client.onboard(lease, kv, cold)
            begun = True
        finally:
            if not begun:
                self._let_go(hot.values())
        whole: Future[bool] = Future()
        ended = _Both(partial(self._over, whole, lease, kv, names, sources, pages, list(hot.values())))
        from_host.add_done_callback(lambda future: ended(_result(future)))
        parts = [part for i, block in hot.items() for part in self._parts(block, pages[i])]
        try:
            self._copier.onboard(kv, parts, lambda error: ended(error is None))
        except ENGINE_ERRORS:  # it is closed
            ended(False)
        return whole

    def _take(
        self, layout: Layout, names: Sequence[Name], sources: Sequence[Source | None], pages: Pages
    ) -> dict[int, _Hot]:
        """Those that are here and have what these pages ask for, held until ``_let_go``. A copy of another block of the
        same name leaves."""
        with self._lock:
            found = {}
            for i, name in enumerate(names):
                block = self._by_name.get(name)
                if block is None or not block.here or sources[i] is None:
                    continue
                if block.source != sources[i]:
                    self._leave(block)
                elif _all_pages(layout, pages[i]):
                    block.readers += 1
                    found[i] = block
            self._eviction.on_hit([block.id for block in found.values()])
            return found

    def _leave(self, block: _Hot) -> None:
        """Out, unless somebody reads it: then the next one to meet it sees to that."""
        if not block.readers:
            self._eviction.on_remove([block.id], evicted=False)
            self._forget(block)

    def _let_go(self, blocks: Iterable[_Hot]) -> None:
        with self._lock:
            for block in blocks:
                block.readers -= 1

    def _parts(self, block: _Hot, pages: Sequence[Sequence[int]]) -> list[CopyPart]:
        return [
            CopyPart(group, self._memory(slot), tuple(pages[group]))
            for group, slot in block.slots.items()
            if pages[group]
        ]

    def _memory(self, slot: Slot) -> Any:
        return self.tier.view(slot) if self.tier.device.type == "cpu" else self.tier.tensor(slot)

    def _over(
        self,
        whole: Future[bool],
        lease: Lease,
        kv: PagedKV,
        names: Sequence[Name],
        sources: Sequence[Source | None],
        pages: Pages,
        read: Sequence[_Hot],
        went_well: bool,
    ) -> None:
        self._let_go(read)
        with self._lock:
            self.counts.served += len(read)
            self.counts.served_bytes += sum(block.size_bytes for block in read)
        try:
            if went_well:
                for i, (name, source) in enumerate(zip(names, sources, strict=True)):
                    if source is not None:
                        self._consider(lease.chain.namespace.layout, i, name, source, kv, pages[i])
        finally:  # whatever a policy raises, nobody waits for ever
            deliver(whole, went_well)

    # -- who comes in, who goes -----------------------------------------------------------------------------------

    def _consider(
        self,
        layout: Layout,
        index: int,
        name: Name,
        source: Source,
        kv: PagedKV,
        pages: Sequence[Sequence[int]],
    ) -> None:
        """Copies a block that was onboarded from host RAM, if it is worth a place here."""
        groups = [group for group, chosen in enumerate(pages) if chosen]
        if len(groups) < len(layout.groups):
            return  # not all of it is in these pages
        sizes = {group: layout.payload_bytes(group) for group in groups}
        with self._lock:
            if name in self._by_name or self._promoting >= _PROMOTIONS:
                return
            info = BlockInfo(FamilyId(0), None, index, sum(sizes.values()))
            if self._admission.admit(info, name[1], self.tier.usage()) is not Verdict.ADMIT:
                return
            slots = self._reserve(sizes)
            if slots is None:
                return
            number = self._free_ids.pop() if self._free_ids else FamilyId(len(self._by_id) + 1)
            block = _Hot(number, name, source, slots, sum(sizes.values()))
            self._by_name[name] = self._by_id[number] = block
            self._promoting += 1
        came = partial(self._came, block, index)
        try:
            self._copier.offload(kv, self._parts(block, pages), None, came)
        except ENGINE_ERRORS as error:  # it is closed
            came(repr(error))

    def _came(self, block: _Hot, depth: int, error: str | None) -> None:
        with self._lock:
            self._promoting -= 1
            if error is not None:
                self.counts.failed += 1
                self._forget(block)
                return
            block.here = True
            self.counts.promoted += 1
            self._eviction.on_insert([BlockInfo(block.id, None, depth, block.size_bytes)])

    def _reserve(self, sizes: dict[int, int]) -> dict[int, Slot] | None:
        slots: dict[int, Slot] = {}
        for group, size in sizes.items():
            found = self.tier.reserve(1, size)
            if found is None and self._evict(size):
                found = self.tier.reserve(1, size)
            if found is None:
                self.tier.release(slots.values())
                return None
            slots[group] = found[0]
        return slots

    def _evict(self, size_bytes: int) -> bool:
        """Room for one slot of this size; not always where it is wanted, when sizes differ."""
        freed = 0
        for number in list(self._eviction.victims(8, lambda number: not self._by_id[number].readers)):
            block = self._by_id[number]
            self._eviction.on_remove([number], evicted=True)
            self._forget(block)
            self.counts.evicted += 1
            freed += block.size_bytes
            if freed >= size_bytes:
                return True
        return False

    def _forget(self, block: _Hot) -> None:
        del self._by_name[block.name], self._by_id[block.id]
        self._free_ids.append(block.id)
        self.tier.release(block.slots.values())

    def __len__(self) -> int:
        """Blocks that are here."""
        with self._lock:
            return sum(block.here for block in self._by_id.values())


def hot_blocks(
    capacity_bytes: int, device: Any, copier: Copier, *, slot_bytes: int = ALIGN_BYTES
) -> HotBlocks:
    """With the policies by default. ``device`` is a ``torch.device``; the copier is told which memory is ours.
    ``slot_bytes``: of the largest part of a block. Raises as ``HbmTier`` does."""
    tier = HbmTier(capacity_bytes, device, slot_bytes=slot_bytes)
    if tier.device.type == "cuda" and isinstance(copier, AnyCopier):
        copier.cuda().device(tier.device.index or 0).add_pool(tier.address, tier.capacity_bytes)
    return HotBlocks(tier, copier)


def _sources(lease: Lease, blocks: int) -> list[Source | None]:
    """``None`` for a block of which a part is not there. Raises ``ClosedError``."""
    lessor, layout = lease.lessor, lease.chain.namespace.layout
    if lessor is None:
        return [None] * blocks
    parts = [layout.part_index(group, 0) for group in range(len(layout.groups))]
    memory, found = lessor.memory, list[Source | None]()
    for family in lease.families[:blocks]:
        slots = [lessor.slot_of(family, part) for part in parts]
        whole = min(slots) >= 0
        found.append(
            (memory.instance, tuple((slot, memory.generation(slot)) for slot in slots)) if whole else None
        )
    return found


def _all_pages(layout: Layout, pages: Sequence[Sequence[int]]) -> bool:
    """Whether each group asks for all pages of a block or none, and one asks. Else the client says what is wrong."""
    counts = [len(chosen) for chosen in pages]
    fitting = [
        count in (0, layout.pages_of(group)) for group, count in enumerate(counts[: len(layout.groups)])
    ]
    return len(counts) == len(layout.groups) and all(fitting) and any(counts)


class _Both:
    """Calls ``then`` when two have said how they ended: True when both went well."""

    def __init__(self, then: Callable[[bool], None]) -> None:
        self._then = then
        self._lock = threading.Lock()
        self._said: list[bool] = []

    def __call__(self, went_well: bool) -> None:
        with self._lock:
            self._said.append(went_well)
            last = len(self._said) == 2
        if last:
            self._then(all(self._said))


def _result(future: Future[bool]) -> bool:
    return not future.cancelled() and future.exception() is None and future.result()
