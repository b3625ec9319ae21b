"""On a machine with an NVIDIA GPU: the worker's side of the vLLM connector, with a daemon in this process.

An engine's life as ``tests/test_vllm_worker.py`` has it on the CPU, with torch's streams in the place of the adversary;
then the two orders that matter, each with a kernel that is late by half a second. No vLLM is needed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierkv.cuda.here import why_not

WHY = why_not()
if WHY is not None:
    pytest.skip(WHY, allow_module_level=True)

import cupy  # noqa: E402
import torch  # noqa: E402

from tests.worker_engine import TorchEngine, serving  # noqa: E402
from tests.worker_life import Life, Request, vllm  # noqa: E402
from tierkv.cuda.device import cupy_stream  # noqa: E402
from tierkv.cuda.kernels import Kernels  # noqa: E402
from tierkv.daemon.remote import RemoteClient  # noqa: E402
from tierkv.units import MIB  # noqa: E402

WorkerSide = vllm["vllm_worker"].WorkerSide
LIVES = 25
PATIENCE_S = 30.0
LATE_CYCLES = 700_000_000
LATE_BYTE = 7


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    with serving(64 * MIB, 4 * MIB) as path:
        yield path


@contextmanager
def a_life(socket: Path, seed: int) -> Iterator[Life]:
    with RemoteClient(str(socket), owner="worker") as client:
        life = Life(seed, client, TorchEngine("cuda", seed), WorkerSide)
        try:
            yield life
        finally:
            life.worker.close(PATIENCE_S)
            torch.cuda.synchronize()


def wait_until(condition: Any, what: str) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s, what
        time.sleep(0.002)


def test_d11_d12_d13_d14_lives_of_an_engine(socket: Path) -> None:
    total: dict[str, int] = {}
    for seed in range(LIVES):
        with a_life(socket, seed) as life:
            for name, count in life.live().items():
                total[name] = total.get(name, 0) + count
    assert {"saved", "checked in the store"} <= total.keys(), total


def test_the_daemons_arena_is_pinned_by_the_worker(socket: Path) -> None:
    with a_life(socket, 1000) as life:
        life.client.health()
        pinning = life.client.copier.cuda().device(0)
        wait_until(
            lambda: pinning.pinning.pinned_bytes == 64 * MIB or pinning.pinning.trouble is not None,
            "pinning does not come to an end",
        )
        assert pinning.pinning.trouble is None, pinning.pinning.trouble


def write_late(life: Life) -> None:
    """A kernel on the engine's stream that fills all of its memory half a second from now."""
    for tensors, order in zip(life.views, life.orders, strict=True):
        for tensor in tensors[:1] if order == "BLHNC" else tensors:
            whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes(),), (1,), 0)
            kernel = Kernels("copies").get("produce_late", 0)
            arguments = (
                np.uint64(whole.data_ptr()),
                np.int64(whole.numel() // 16),
                np.uint32(LATE_BYTE * 0x01010101),
                np.int64(LATE_CYCLES),
            )
            stream = cupy_stream(cupy, torch.cuda.current_stream())
            kernel((64,), (256,), arguments, stream=stream)


def test_d12_a_save_waits_for_a_late_forward_pass(socket: Path) -> None:
    with a_life(socket, 2000) as life:
        request = Request("r", 0, 1, life.pool.take(life.engine_blocks, life.dice))
        life.requests.append(request)
        life._write(request.pages[0], None)  # whatever is made at the first time is made
        torch.cuda.synchronize()
        write_late(life)
        life._compute(request)
        while request.computed < len(request.pages):
            life._compute(request)
        behind = torch.cuda.Event()
        behind.record()
        meta, life.meta = life.meta, vllm["vllm_messages"].StepMeta()
        assert meta.saves
        life.worker.start_saves(meta)
        assert not behind.query(), "the pass was over before the save was asked for"
        life._end()  # compares what the store has with what was computed


def test_d12_a_load_waits_for_a_late_forward_pass(socket: Path) -> None:
    """The pass of a request that has ended still writes to the pages that the load was given."""
    with a_life(socket, 3000) as life:
        chain = life._chain(0, 2)
        payloads = [[life._stored(0, i, group) for group in range(len(life.groups))] for i in range(2)]
        assert life.client.put(chain, payloads).stored == 2
        request = Request("r", 0, 2, life.pool.take(2 * life.engine_blocks, life.dice))
        life.requests.append(request)
        life._load(request, life.client.load(chain))
        torch.cuda.synchronize()
        write_late(life)
        behind = torch.cuda.Event()
        behind.record()
        meta, life.meta = life.meta, vllm["vllm_messages"].StepMeta()
        life.worker.start_loads(meta)
        assert not behind.query(), "the pass was over before the load was asked for"
        life._end()
        assert life.seen.counts["loaded"] == 1
