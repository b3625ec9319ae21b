"""The CUDA kernels themselves, compiled for the CPU by the host's compiler: their threads are threads, their blocks
come one after the other. So what they compute is shown without a GPU; how fast, and what streams do to it, is not."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tierkv.cuda.kernels import FOLDER, header_folders

SHIM = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <vector_functions.h>
#include <pthread.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>
using std::max;
#undef __shared__
#define __shared__ static
struct Place { int x, y; };
static thread_local Place threadIdx;
static Place blockIdx, blockDim, gridDim;
static pthread_barrier_t all_threads;
static inline void __syncthreads() { pthread_barrier_wait(&all_threads); }
static inline float __int_as_float(int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline long long clock64() { return 1LL << 62; }
#include SOURCE

template <typename Kernel>
static void launch(Kernel kernel, Place grid, Place block) {
  gridDim = grid, blockDim = block;
  int count = block.x * block.y;
  pthread_barrier_init(&all_threads, nullptr, count);
  std::vector<std::thread> threads;
  for (int i = 0; i < count; i++)
    threads.emplace_back([=] {
      threadIdx = {i % block.x, i / block.x};
      for (int y = 0; y < grid.y; y++)
        for (int x = 0; x < grid.x; x++) {
          if (i == 0) blockIdx = {x, y};
          __syncthreads();
          kernel();
          __syncthreads();
        }
    });
  for (auto& each : threads) each.join();
  pthread_barrier_destroy(&all_threads);
}

typedef void* P;
extern "C" void launch_by_channel(void (*f)(P, P, P, int, int), P a, P b, P c, int t, int n, Place grid, Place block) {
  launch([=] { f(a, b, c, t, n); }, grid, block);
}
extern "C" void launch_by_row(void (*f)(P, P, P, long long), P a, P b, P c, long long n, Place grid, Place block) {
  launch([=] { f(a, b, c, n); }, grid, block);
}
extern "C" void launch_copy(void (*f)(P, long long, long long), P table, long long n, long long pieces, Place grid,
                            Place block) {
  launch([=] { f(table, n, pieces); }, grid, block);
}
"""


class _Place(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int))


def why_not() -> str | None:
    """Why they cannot be compiled here."""
    if shutil.which("g++") is None:
        return "there is no g++"
    if next(header_folders(), None) is None:
        return "CUDA's headers are not here"
    return None


class CpuKernels:
    """The kernels of one source. Nothing may be launched beside."""

    def __init__(self, source: str) -> None:
        self._library = _built(source)

    def by_channel(
        self, name: str, pointers: list[int], tokens: int, channels: int, grid: Any, block: Any
    ) -> None:
        kernel, (a, b, c) = getattr(self._library, name), map(ctypes.c_void_p, pointers)
        self._library.launch_by_channel(kernel, a, b, c, tokens, channels, _Place(*grid), _Place(*block))

    def by_row(self, name: str, pointers: list[int], size: int, grid: Any, block: Any) -> None:
        kernel, (a, b, c) = getattr(self._library, name), map(ctypes.c_void_p, pointers)
        row = ctypes.c_longlong(size)
        self._library.launch_by_row(kernel, a, b, c, row, _Place(grid[0], 1), _Place(block[0], 1))

    def copy(self, table: int, runs: int, pieces: int, blocks: int, threads: int) -> None:
        numbers = (ctypes.c_void_p(table), ctypes.c_longlong(runs), ctypes.c_longlong(pieces))
        self._library.launch_copy(self._library.copy_runs, *numbers, _Place(blocks, 1), _Place(threads, 1))


@cache
def _built(source: str) -> ctypes.CDLL:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shim.cpp").write_text(SHIM)
        # No product is added to a sum in one rounding: the codecs have none, so neither has a GPU.
        command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-pthread"]
        command += [f"-I{each}" for each in header_folders()]
        command += [
            f'-DSOURCE="{FOLDER / source}.cu"',
            "-o",
            str(folder / "kernels.so"),
            str(folder / "shim.cpp"),
        ]
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert made.returncode == 0, made.stderr[-3000:]
        return ctypes.CDLL(str(folder / "kernels.so"))
