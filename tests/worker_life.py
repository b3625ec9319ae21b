"""An engine with a GPU, as vLLM is one, lives with the worker's side of its connector under a seeded adversary.

The engine hands its work to a stream of a ``ManualDevice`` and goes on; the seed says when that happens, and in which
order the copies do. Requests come, compute, load, end, are aborted and preempted at every stage, and their pages are
given to others at once, as vLLM does it: a page is held back only by a save that copies from it (the scheduler's own
``Saves``) or by a load that is under way. The store, its daemon, the client and the mapped arena are real ones.

Every byte is compared: pages when a load is told to be over, and in the end all that the store has.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.stand_in_vllm import worker_modules
from tests.worker_engine import ORDERS, PAGES, SIZES, Engine, Pool
from tierkv.daemon.remote import RemoteClient
from tierkv.handles import Lease
from tierkv.keys import Chain, Extras, NamespaceSpec, Weights
from tierkv.layout import GroupKind, Layout
from tierkv.loans import lend
from tierkv.retention import KEEP
from tierkv.testing.payloads import POISON

vllm = worker_modules()

PATIENCE_S = 30.0
HASH_TOKENS = 16


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
    """One engine. ``worker`` makes the worker's side."""

    def __init__(self, seed: int, client: RemoteClient, engine: Engine, worker: Callable[..., Any]) -> None:
        self.seed, self.client, self.engine = seed, client, engine
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
        self.page_bytes: list[int] = []
        self.caches: dict[str, Any] = {}
        for number in range(dice.choice((1, 1, 2))):
            size, order, layers = dice.choice(SIZES), dice.choice(ORDERS), dice.randint(1, 3)
            names = tuple(f"{number}.{layer}" for layer in range(layers))
            views = engine.memory(size, order, layers)
            self.caches |= dict(zip(names, views, strict=True))
            self.groups.append(group(0, GroupKind.FULL, HASH_TOKENS, None, False, names))
            self.views.append(views)
            self.orders.append(order)
            self.page_bytes.append(math.prod(size))
        facts = self.worker.register(self.caches, tuple(self.groups), PAGES, {}, engine.device)
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
            if self.dice.random() < 0.8:
                self._hand_in()
            for _ in range(self.dice.choice((0, 2, 15, 80))):
                self.engine.step()
            self._check()
        self._end()
        return self.seen.counts

    def _hand_in(self) -> None:
        """Waits until the worker's threads have handed in what they were given: then the seed says what happens."""
        for lane in (vllm["vllm_worker"].LOAD_LANE, vllm["vllm_worker"].SAVE_LANE):
            told = threading.Event()
            self.worker._executor.run(lane, lambda: None, lambda _, told=told: told.set())
            assert told.wait(PATIENCE_S), f"{lane} does not get on"

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
                self._write(page, None)
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
            self._write(page, None)
            self._write(page, name)
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
            while self.engine.step():
                pass
            self._step_without_work()
            loading = any(request.loading is not None for request in self.requests)
            busy = loading or bool(len(self.saves)) or bool(self.meta.loads or self.meta.saves)
            if busy:
                self.engine.wait(0.002)
        for request in list(self.requests):
            self._give_back(request)
        self._check()
        assert self.engine.idle()
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
            [payload(name, number, layer, self.page_bytes[number]) for layer in range(len(views))]
            for number, views in enumerate(self.views)
        ]

    def _page(self, page: int) -> list[list[bytes]]:
        return [
            [self.engine.reads(view, page, order) for view in views]
            for views, order in zip(self.views, self.orders, strict=True)
        ]

    def _write(self, page: int, name: bytes | None) -> None:
        for number, (views, order) in enumerate(zip(self.views, self.orders, strict=True)):
            for layer, view in enumerate(views):
                size = self.page_bytes[number]
                raw = bytes([POISON]) * size if name is None else payload(name, number, layer, size)
                self.engine.writes(view, page, order, raw)

    def _stored(self, prompt: int, block: int, group: int) -> bytes:
        first = block * self.engine_blocks
        names = [self._hash(prompt, first + i) for i in range(self.engine_blocks)]
        layers = range(len(self.views[group]))
        return b"".join(self._content(name)[group][layer] for layer in layers for name in names)


def payload(name: bytes, group: int, layer: int, size: int) -> bytes:
    return hashlib.shake_128(name + bytes([group, layer])).digest(size)
