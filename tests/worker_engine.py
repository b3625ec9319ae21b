"""Engines for ``tests.worker_life``: memory laid out as vLLM lays it out, and work that is done in its own time.

``ManualEngine`` has a GPU that a seed moves; ``TorchEngine`` a real one, or CPU tensors, whose work is done when it is
asked for.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np

from tests.stand_in_cuda import Tensor
from tierkv.arena import Arena
from tierkv.clock import SystemClock
from tierkv.copier import CopyPart, PagedKV, ReadyEvent
from tierkv.daemon.server import Server
from tierkv.executor import ThreadExecutor
from tierkv.layout import Layout
from tierkv.page_runs import check_declared
from tierkv.policies.lru import LruPolicy
from tierkv.policies.on_hit import OnHitPolicy
from tierkv.routes import RouteTable
from tierkv.store import Limits, TieredStore
from tierkv.stream_copier import StreamCopier
from tierkv.streams import Route
from tierkv.testing.manual import ManualDevice, ManualEvent
from tierkv.testing.payloads import POISON
from tierkv.tiers.host import HostTier
from tierkv.units import MIB

PAGES = 24
STREAM = "compute"
SIZES = ((2, 3, 8), (1, 2, 16), (3, 2, 5))
"""Heads, tokens and content of a page."""
ORDERS = ("BHNC", "BNHC", "HBNC", "BLHNC")
"""How layers, blocks, heads, tokens and content follow each other in memory. vLLM's views always say B, H, N, C."""

Bytes = np.ndarray[Any, Any]


class Engine(Protocol):
    """Its memory, and what it asks of its device: in order, but not at once."""

    device: str

    def memory(self, size: tuple[int, int, int], order: str, layers: int) -> list[Any]:
        """Views [blocks, heads, tokens, content], one for each layer."""
        ...

    def writes(self, view: Any, page: int, order: str, raw: bytes) -> None:
        """Asks for these bytes to be written to a page, in the order of its memory."""
        ...

    def reads(self, view: Any, page: int, order: str) -> bytes:
        """What is there now, whatever was asked for."""
        ...

    def step(self) -> bool:
        """Lets one thing happen. False when nothing can."""
        ...

    def idle(self) -> bool: ...

    def wait(self, timeout_s: float) -> None:
        """Until there may be something to do."""
        ...


class ManualEngine:
    def __init__(self, device: ManualDevice) -> None:
        self.device = "cuda"
        self.manual = device

    def memory(self, size: tuple[int, int, int], order: str, layers: int) -> list[Tensor]:
        return [Tensor(view) for view in memory_of(size, order, layers)]

    def writes(self, view: Tensor, page: int, order: str, raw: bytes) -> None:
        def work() -> None:
            target = as_it_lies(view.array[page], order)
            target[...] = np.frombuffer(raw, np.uint8).reshape(target.shape)

        self.manual.engine_does(STREAM, work)

    def reads(self, view: Tensor, page: int, order: str) -> bytes:
        return as_it_lies(view.array[page], order).tobytes()

    def mark(self) -> ManualEvent:
        """An event behind what was asked for so far."""
        return self.manual.engine_event(STREAM)

    def step(self) -> bool:
        return self.manual.step()

    def idle(self) -> bool:
        return self.manual.idle()

    def wait(self, timeout_s: float) -> None:
        self.manual.handed_in.wait(timeout_s)
        self.manual.handed_in.clear()


class TorchEngine:
    """``device``: "cuda", or "cpu" where work is over when it was asked for."""

    def __init__(self, device: str, seed: int) -> None:
        import torch

        self.torch, self.device = torch, device
        self.dice = random.Random(seed)
        self._reader = torch.cuda.Stream() if device == "cuda" else None
        self._outbox = torch.empty(MIB, dtype=torch.uint8, pin_memory=device == "cuda")
        self._sent = 0
        self._never = threading.Event()

    def memory(self, size: tuple[int, int, int], order: str, layers: int) -> list[Any]:
        views = memory_of(size, order, layers)
        whole = self.torch.from_numpy(views[0] if views[0].base is None else views[0].base).to(self.device)
        made = []
        for view in views:
            own = whole if order == "BLHNC" else self.torch.full_like(whole, POISON)
            strides = tuple(stride // view.itemsize for stride in view.strides)
            offset = view.ctypes.data - views[0].ctypes.data if order == "BLHNC" else 0
            made.append(own.as_strided(view.shape, strides, offset))
        return made

    def writes(self, view: Any, page: int, order: str, raw: bytes) -> None:
        assert self._sent + len(raw) <= len(self._outbox), "the life is too long"
        host = self._outbox[self._sent : self._sent + len(raw)]
        self._sent += len(raw)
        host.copy_(self.torch.from_numpy(np.frombuffer(raw, np.uint8).copy()))
        if self.device == "cuda":
            self.torch.cuda._sleep(self.dice.choice((0, 1000, 200_000, 3_000_000)))
        target = view[page].permute(1, 0, 2) if order == "BNHC" else view[page]
        target.copy_(host.reshape(target.shape), non_blocking=True)

    def reads(self, view: Any, page: int, order: str) -> bytes:
        """On a stream of its own, so that it does not wait for the engine's."""
        if self._reader is None:
            return as_it_lies(view[page].numpy(), order).tobytes()
        with self.torch.cuda.stream(self._reader):
            found = view[page].clone()
        self._reader.synchronize()
        return as_it_lies(found.cpu().numpy(), order).tobytes()

    def step(self) -> bool:
        return False

    def idle(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        self._never.wait(timeout_s)


def memory_of(size: tuple[int, int, int], order: str, layers: int) -> list[Bytes]:
    """Views [blocks, heads, tokens, content], one for each layer."""
    heads, tokens, content = size
    if order == "BLHNC":
        whole = np.full((PAGES, layers, heads, tokens, content), POISON, np.uint8)
        return [whole[:, layer] for layer in range(layers)]
    shape, back = {
        "BHNC": ((PAGES, heads, tokens, content), (0, 1, 2, 3)),
        "BNHC": ((PAGES, tokens, heads, content), (0, 2, 1, 3)),
        "HBNC": ((heads, PAGES, tokens, content), (1, 0, 2, 3)),
    }[order]
    return [np.full(shape, POISON, np.uint8).transpose(back) for _ in range(layers)]


def as_it_lies(page: Bytes, order: str) -> Bytes:
    """A page's bytes in the order of its memory; a view."""
    return page.transpose(1, 0, 2) if order == "BNHC" else page


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


@contextmanager
def serving(capacity_bytes: int, region_bytes: int) -> Iterator[Path]:
    """A daemon in this process with host RAM and nothing else; the path of its socket."""
    clock = SystemClock()
    arena = Arena(capacity_bytes, region_bytes, memfd=True)
    executor = ThreadExecutor(clock)
    store = TieredStore(HostTier(arena), LruPolicy(), [], OnHitPolicy(), Limits(), clock, executor, None)
    store.start(populate=False)
    with TemporaryDirectory(prefix="tierkv-") as folder:
        server = Server(store, Path(folder, "socket"))
        server.start()
        try:
            yield server.path
        finally:
            server.stop()
            server.close(20.0)
            store.close()
