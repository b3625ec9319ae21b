"""An engine with a GPU, as vLLM is one, lives with the worker's side of its connector under a seeded adversary.

The engine hands its work to a stream of a ``ManualDevice`` and goes on; the seed says when that happens, and in which
order the copies do. Requests come, compute, load, end, are aborted and preempted at every stage, and their pages are
given to others at once, as vLLM does it: a page is held back only by a save that copies from it (the scheduler's own
``Saves``) or by a load that is under way. The store, its daemon, the client and the mapped arena are real ones.

Every byte is compared: pages when a load is told to be over, and in the end all that the store has.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tests.stand_in_cuda import Tensor
from tests.stand_in_vllm import worker_modules
from tierkv.copier import CopyPart, PagedKV, ReadyEvent
from tierkv.daemon.remote import RemoteClient
from tierkv.handles import Lease
from tierkv.keys import Chain, Extras, NamespaceSpec, Weights
from tierkv.layout import GroupKind, Layout
from tierkv.loans import lend
from tierkv.page_runs import check_declared
from tierkv.retention import KEEP
from tierkv.routes import RouteTable
from tierkv.stream_copier import StreamCopier
from tierkv.streams import Route
from tierkv.testing.manual import ManualDevice, ManualEvent
from tierkv.testing.payloads import POISON

vllm = worker_modules()

PATIENCE_S = 30.0
PAGES = 24
HASH_TOKENS = 16
STREAM = "compute"
SIZES = ((2, 3, 8), (1, 2, 16), (3, 2, 5))
"""Heads, tokens and content of a page."""
ORDERS = ("BHNC", "BNHC", "HBNC", "BLHNC")
"""How layers, blocks, heads, tokens and content follow each other in memory. vLLM's views always say B, H, N, C."""


@dataclass(eq=False)
class Page:
    """What vLLM's pool knows of one of its blocks."""

    number: int
    ref_cnt: int = 0


class Pool:
    """As far as ``Saves`` uses vLLM's. The first page is the one that keeps nothing."""

    def __init__(self) -> None:
        self.blocks = [Page(number) for number in range(PAGES)]
        self.free = list(range(1, PAGES))

    def take(self, count: int, dice: random.Random) -> list[int]:
        """Any of the free ones: those that were given back last as soon as others."""
        chosen = dice.sample(self.free, count)
        self.touch(self.blocks[number] for number in chosen)
        return chosen

    def touch(self, pages: Iterable[Page]) -> None:
        for page in pages:
            if not page.ref_cnt:
                self.free.remove(page.number)
            page.ref_cnt += 1

    def free_blocks(self, pages: Iterable[Page]) -> None:
        for page in pages:
            page.ref_cnt -= 1
            assert page.ref_cnt >= 0
            if not page.ref_cnt:
                self.free.append(page.number)


class OnManualDevice:
    """In the place of ``CudaCopier``: the copier over streams, over a device that the test moves."""

    def __init__(self, device: ManualDevice, dice: random.Random) -> None:
        self.copier = StreamCopier(
            device,
            routes=RouteTable(((0, dice.choice([*Route])),), ((0, dice.choice([*Route])),)),
            staging_bytes=dice.choice((64, 200, 1000)),
            buffers=dice.randint(1, 3),
            offload_share=dice.choice((0.1, 0.5, 0.9)),
        )
        self.broken = False
        """Every onboard fails, after it has copied nothing."""

    def check(self, kv: PagedKV, layout: Layout) -> None:
        check_declared(kv, layout)

    def offload(self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: Any) -> None:
        self.copier.offload(kv, parts, ready, done)

    def onboard(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        done: Any,
        on_layer: Any = None,
        ready: ReadyEvent | None = None,
    ) -> None:
        if self.broken:
            done("injected")
        else:
            self.copier.onboard(kv, parts, done, on_layer, ready)

    def prepare(self, kv: PagedKV) -> None:
        pass

    def pin(self, memory: memoryview, region_bytes: int) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        self.copier.close(timeout_s)


@dataclass(eq=False)
class Request:
    id: str
    prompt: int
    blocks: int
    """Of the store."""
    pages: list[int]
    computed: int = 0
    """Engine blocks."""
    offered: int = 0
    """Blocks of the store that were given to ``Saves``."""
    loading: Lease | None = None
    skip: int = 0
    aborted: bool = False


@dataclass
class Seen:
    """How often what happened."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1


class Life:
    """``worker`` makes the worker's side; ``mark`` is what it gets for the engine's event."""

    def __init__(
        self, seed: int, client: RemoteClient, device: ManualDevice, worker: Callable[..., Any]
    ) -> None:
        self.seed, self.client, self.device = seed, client, device
        self.dice = dice = random.Random(seed)
        self.engine_blocks = dice.randint(1, 2)
        self.pool = Pool()
        self.wrong: list[str] = []
        self.seen = Seen()
        self.requests: list[Request] = []
        self.numbers = iter(range(10**6))
        self.worker = worker(client, 0, vllm["vllm_stats"].Counts())
        group = vllm["vllm_layout"].CacheGroup
        self.groups, self.views, self.orders = [], [], []
        self.caches: dict[str, Tensor] = {}
        for number in range(dice.choice((1, 1, 2))):
            size, order, layers = dice.choice(SIZES), dice.choice(ORDERS), dice.randint(1, 3)
            names = tuple(f"{number}.{layer}" for layer in range(layers))
            views = memory_of(size, order, layers)
            self.caches |= {name: Tensor(view) for name, view in zip(names, views, strict=True)}
            self.groups.append(group(0, GroupKind.FULL, HASH_TOKENS, None, False, names))
            self.views.append(views)
            self.orders.append(order)
        facts = self.worker.register(self.caches, tuple(self.groups), PAGES, {}, "cuda")
        assert facts.trouble is None, facts.trouble
        layer_groups = vllm["vllm_layout"].layer_groups_of(self.groups, facts)
        layout = Layout(f"life-{seed}", "int8", HASH_TOKENS, layer_groups, self.engine_blocks)
        self.spec = NamespaceSpec(
            Weights("revision", f"life-{seed}"), layout, "vllm", hash_scheme="vllm-sha256"
        )
        self.space = client.open_namespace(self.spec)
        self.tables = vllm["vllm_tables"].Tables(layout, self.groups, 0)
        self.saves = vllm["vllm_saving"].Saves(self.pool, self.tables, 1, dice.choice((0.2, 0.5, 1.0)))
        self.meta = vllm["vllm_messages"].StepMeta()

    # -- what happens ---------------------------------------------------------------------------------------------

    def live(self) -> dict[str, int]:
        for _ in range(self.dice.randint(6, 14)):
            self._act()
            self._step()
            for _ in range(self.dice.choice((0, 2, 15, 80))):
                self.device.step()
            self._check()
        self._end()
        return self.seen.counts

    def _act(self) -> None:
        what = self.dice.random()
        mine = [request for request in self.requests if not request.aborted]
        if mine and what < 0.35:
            self._leave(self.dice.choice(mine))
        else:
            self._come()

    def _come(self) -> None:
        prompt, blocks = self.dice.randrange(3), self.dice.randint(1, 3)
        needed = blocks * self.engine_blocks
        if len(self.pool.free) < needed:
            return
        pages = self.pool.take(needed, self.dice)
        request = Request(f"r{next(self.numbers)}", prompt, blocks, pages)
        self.requests.append(request)
        lease = self.client.load(self._chain(prompt, blocks), timeout_s=PATIENCE_S)
        if len(lease):
            self._load(request, lease)
        else:
            lease.release()

    def _load(self, request: Request, lease: Lease) -> None:
        self.seen.add("loads")
        request.loading = lease
        self.meta.loads.append(
            vllm["vllm_messages"].LoadJob(
                request.id,
                self._prompt(request),
                lend(lease),
                self.tables.cut([request.pages], len(lease)),
                0,
            )
        )

    def _leave(self, request: Request) -> None:
        """The end, an abort or a preemption: of one that loads, computes, or is being saved. A forward pass that was
        under way for it writes once more."""
        if request.loading is not None:
            self.seen.add("left while loading")
            request.aborted = True  # the engine keeps the pages until the load is told to be over
            return
        self.seen.add("left while saving" if self.saves.pending(request.id) else "left")
        if self.dice.random() < 0.6:
            for page in request.pages[request.computed :]:
                self.device.engine_does(STREAM, partial(self._write, page, None))
            self.seen.add("stale writes")
        self._give_back(request)

    def _give_back(self, request: Request) -> None:
        self.requests.remove(request)
        self.pool.free_blocks(self.pool.blocks[page] for page in reversed(request.pages))

    def _step(self) -> None:
        """A step of the engine: its forward pass is asked for, then the connector's hooks come, as vLLM calls them."""
        for request in self.requests:
            if request.loading is None and self.dice.random() < 0.8:
                self._compute(request)
        meta, self.meta = self.meta, vllm["vllm_messages"].StepMeta()
        self.worker.start_loads(meta)
        self.worker.start_saves(meta)
        self._hear()

    def _compute(self, request: Request) -> None:
        end = min(len(request.pages), request.computed + self.dice.randint(1, 3))
        for block in range(request.computed, end):
            page, name = request.pages[block], self._hash(request.prompt, block)
            self.device.engine_does(STREAM, partial(self._write, page, None))
            self.device.engine_does(STREAM, partial(self._write, page, name))
        request.computed = end
        full = end // self.engine_blocks
        if full > request.offered:
            jobs, request.offered = self.saves.begin(
                request.id, self._prompt(request), range(request.offered, full), [request.pages], KEEP
            )
            self.meta.saves += jobs
            for _ in jobs:
                self.seen.add("saves")

    def _hear(self) -> None:
        over, missing, failed = self.worker.finished(idle=False)
        for request in [one for one in self.requests if one.id in over]:
            assert request.loading is not None
            blocks = len(request.loading) * self.engine_blocks
            lost = [at for at in range(blocks) if request.pages[at] in missing]
            assert bool(lost) == (request.id in failed)
            request.computed = min(lost, default=blocks)
            request.offered = request.computed // self.engine_blocks
            request.loading.release()
            request.loading = None
            self._loaded(request)
            if request.aborted:
                self._give_back(request)
        report = self.worker.report()
        if report is not None:
            for _, _, blocks, stored in self.saves.end(report):
                self.seen.add("saved" if stored == blocks else "not saved")

    def _loaded(self, request: Request) -> None:
        for block in range(request.computed):
            wanted = self._content(self._hash(request.prompt, block))
            if self._page(request.pages[block]) != wanted:
                self.wrong.append(f"{request.id}: told to be loaded, and block {block} is not there")
        self.seen.add("loaded")

    def _check(self) -> None:
        assert not self.wrong, "; ".join(self.wrong)

    def _end(self) -> None:
        until_s = time.monotonic() + PATIENCE_S
        busy = True
        while busy:
            assert time.monotonic() < until_s, "it does not come to an end"
            self.device.handed_in.clear()
            while self.device.step():
                pass
            self._step_without_work()
            loading = any(request.loading is not None for request in self.requests)
            busy = loading or bool(len(self.saves)) or bool(self.meta.loads or self.meta.saves)
            if busy:
                self.device.handed_in.wait(0.002)
        for request in list(self.requests):
            self._give_back(request)
        self._check()
        assert self.device.idle()
        assert sorted(self.pool.free) == list(range(1, PAGES)), "pages are held for ever"
        assert self.saves.pages_held == 0
        for prompt in range(3):
            self._check_stored(prompt)

    def _step_without_work(self) -> None:
        meta, self.meta = self.meta, vllm["vllm_messages"].StepMeta()
        self.worker.start_loads(meta)
        self.worker.start_saves(meta)
        self._hear()

    def _check_stored(self, prompt: int) -> None:
        """What other engines would get."""
        with self.client.load(self._chain(prompt, 3), timeout_s=PATIENCE_S) as lease:
            for i in range(len(lease)):
                for group in range(len(self.groups)):
                    found, wanted = bytes(lease.view(i, group)), self._stored(prompt, i, group)
                    assert found[: len(wanted)] == wanted, (
                        f"block {i} of prompt {prompt} is wrong in the store"
                    )
                self.seen.add("checked in the store")

    # -- names and bytes ------------------------------------------------------------------------------------------

    def _hash(self, prompt: int, block: int) -> bytes:
        return hashlib.sha256(f"{self.seed}/{prompt}/{block}".encode()).digest()

    def _hashes(self, prompt: int, blocks: int) -> list[bytes]:
        return [self._hash(prompt, block) for block in range(blocks * self.engine_blocks)]

    def _tokens(self, blocks: int) -> int:
        return blocks * self.engine_blocks * HASH_TOKENS + 1

    def _chain(self, prompt: int, blocks: int) -> Chain:
        return self.space.chain(
            engine_hashes=self._hashes(prompt, blocks), num_tokens=self._tokens(blocks), extras=Extras()
        )

    def _prompt(self, request: Request) -> Any:
        hashes = self._hashes(request.prompt, request.blocks)
        return vllm["vllm_messages"].Prompt(
            b"".join(hashes), len(hashes[0]), self._tokens(request.blocks), Extras(), self.spec
        )

    def _content(self, name: bytes) -> list[list[bytes]]:
        """What the engine computes for a block: for each group and layer the bytes of a page as it lies."""
        return [
            [payload(name, number, layer, view[0].size) for layer, view in enumerate(views)]
            for number, views in enumerate(self.views)
        ]

    def _page(self, page: int) -> list[list[bytes]]:
        return [
            [as_it_lies(view[page], order) for view in views]
            for views, order in zip(self.views, self.orders, strict=True)
        ]

    def _write(self, page: int, name: bytes | None) -> None:
        for number, (views, order) in enumerate(zip(self.views, self.orders, strict=True)):
            for layer, view in enumerate(views):
                raw = (
                    bytes([POISON]) * view[page].size
                    if name is None
                    else payload(name, number, layer, view[page].size)
                )
                put_as_it_lies(view[page], order, raw)

    def _stored(self, prompt: int, block: int, group: int) -> bytes:
        first = block * self.engine_blocks
        names = [self._hash(prompt, first + i) for i in range(self.engine_blocks)]
        layers = range(len(self.views[group]))
        return b"".join(self._content(name)[group][layer] for layer in layers for name in names)


def memory_of(size: tuple[int, int, int], order: str, layers: int) -> list[np.ndarray[Any, Any]]:
    """Views [blocks, heads, tokens, content], one for each layer."""
    heads, tokens, content = size
    if order == "BLHNC":
        whole = np.full((PAGES, layers, heads, tokens, content), POISON, np.uint8)
        return [whole[:, layer] for layer in range(layers)]
    made = []
    for _ in range(layers):
        if order == "BNHC":
            made.append(np.full((PAGES, tokens, heads, content), POISON, np.uint8).transpose(0, 2, 1, 3))
        elif order == "HBNC":
            made.append(np.full((heads, PAGES, tokens, content), POISON, np.uint8).transpose(1, 0, 2, 3))
        else:
            made.append(np.full((PAGES, heads, tokens, content), POISON, np.uint8))
    return made


def as_it_lies(page: np.ndarray[Any, Any], order: str) -> bytes:
    return (page.transpose(1, 0, 2) if order == "BNHC" else page).tobytes()


def put_as_it_lies(page: np.ndarray[Any, Any], order: str, raw: bytes) -> None:
    target = page.transpose(1, 0, 2) if order == "BNHC" else page
    target[...] = np.frombuffer(raw, np.uint8).reshape(target.shape)


def payload(name: bytes, group: int, layer: int, size: int) -> bytes:
    return hashlib.shake_128(name + bytes([group, layer])).digest(size)


def mark_of(device: ManualDevice) -> Callable[[], ManualEvent]:
    """What the worker records behind the engine's work."""
    return partial(device.engine_event, STREAM)
