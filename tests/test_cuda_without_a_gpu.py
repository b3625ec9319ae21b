"""What of the GPU's side can be shown without one: sources compile, pinning is bounded and explained, nothing loads
early."""

import ctypes
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierkv.clock import SystemClock
from tierkv.copier import LayerPages, PagedKV
from tierkv.cuda.batches import Batches
from tierkv.cuda.capture import find_recordings
from tierkv.cuda.copier import CudaCopier
from tierkv.cuda.here import why_not
from tierkv.cuda.kernels import FOLDER, SOURCES, header_folders
from tierkv.cuda.pinning import Pinning, Reach
from tierkv.errors import ConfigError, LayoutError
from tierkv.executor import ThreadExecutor

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("source", SOURCES)
def test_sources_compile(source: str, tmp_path: Path) -> None:
    command = ["nvcc", "-arch=sm_90", "-cubin", "-Werror", "all-warnings"]
    made = subprocess.run(
        [*command, "-o", tmp_path / "out.cubin", FOLDER / f"{source}.cu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "out.cubin").stat().st_size > 1000


def test_all_sources_are_known_and_shipped() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.cu")) == sorted(SOURCES)
    settings = (FOLDER.parent.parent / "pyproject.toml").read_text()
    assert '"tierkv.cuda" = ["*.cu"]' in settings


def test_importing_it_loads_neither_torch_nor_cupy() -> None:
    code = (
        "import sys, tierkv.cuda.copier, tierkv.cuda.codecs, tierkv.cuda.kernels\n"
        "assert not {'torch', 'cupy'} & sys.modules.keys(), 'loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(why_not() is None, reason="there is a GPU")
def test_without_a_gpu_it_says_why() -> None:
    executor = ThreadExecutor(SystemClock())
    try:
        copier = CudaCopier(executor)
        with pytest.raises(ConfigError, match=r"cuda = 0: .*(torch|cupy)"):
            copier.device(0)
        with pytest.raises(LayoutError, match="one CUDA device"):
            copier.on(PagedKV(((LayerPages((np.zeros((2, 8)),)),),)))
        copier.close()
    finally:
        executor.close(10.0)
    said = subprocess.run(
        [sys.executable, "-m", "tierkv.cuda.here"], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == why_not()


@pytest.mark.skipif(why_not() is None, reason="there is a GPU")
def test_without_a_gpu_commands_end_well_and_name_the_python_that_was_asked(tmp_path: Path) -> None:
    made = subprocess.run(
        ["make", "test-gpu", f"GPU_PY={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert made.stdout.strip() == f"test-gpu: skipped: {sys.executable}: {why_not()}"
    target = tmp_path / "new" / "gpu.json"
    bench = [sys.executable, "-m", "bench.gpu", "--json", str(target)]
    said = subprocess.run(bench, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert said.stdout.strip() == f"bench.gpu: skipped: {why_not()}"
    assert json.loads(target.read_text()) == {"skipped": why_not()}


def test_headers_are_looked_for_where_they_may_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_fp8.h").touch()
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert next(header_folders()) == str(tmp_path / "include")


# ---- pinning


def longs(*values: int) -> Any:
    return np.array(values, np.int64)


def test_a_stretch_across_two_registrations_is_not_reached() -> None:
    reach = Reach()
    assert not reach.holds(longs(0), longs(1)).any()
    reach.add(4096, 4096)
    reach.add(8192, 4096)
    address = longs(4095, 4096, 8000, 8192, 12287, 12288, 0)
    assert reach.holds(address, longs(1, 4096, 200, 4096, 1, 1, 1)).tolist() == [
        False, True, False, True, True, False, False,
    ]  # fmt: skip
    reach.remove(8192)
    assert reach.holds(longs(8192, 4096), longs(1, 1)).tolist() == [False, True]


def test_pinning_goes_stretch_by_stretch_and_is_undone() -> None:
    reach, calls = Reach(), []
    pinning = Pinning(reach, lambda at, size: calls.append((at, size)), lambda at: calls.append((at, 0)))
    pinning.run(4096, 20480, 8192)
    assert calls == [(4096, 8192), (12288, 8192), (20480, 4096)]
    assert (pinning.pinned_bytes, pinning.trouble) == (20480, None)
    assert reach.holds(longs(20480), longs(4096)).all()
    pinning.close()
    assert calls[3:] == [(20480, 0), (12288, 0), (4096, 0)]
    assert not reach.holds(longs(4096), longs(1)).any()
    pinning.run(4096, 8192, 8192)
    assert len(calls) == 6, "pinned after it was closed"


@pytest.mark.parametrize(
    ("soft", "hard", "says"),
    [
        (64 << 20, 64 << 20, "may lock 64.0 MiB: raise the limit, with LimitMEMLOCK=infinity"),
        (64 << 20, resource.RLIM_INFINITY, r"`ulimit -l unlimited` is allowed here"),
        (
            resource.RLIM_INFINITY,
            resource.RLIM_INFINITY,
            "^8 of 24 MiB .*The rest is copied through small pinned",
        ),
    ],
)
def test_a_limit_on_locked_memory_is_explained(
    soft: int, hard: int, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))

    def register(address: int, size: int) -> None:
        if address:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")

    pinning = Pinning(Reach(), register, lambda at: None)
    pinning.run(0, 24 << 20, 8 << 20)
    assert pinning.pinned_bytes == 8 << 20
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(pinning.trouble)
    assert caplog.messages == [pinning.trouble]


# ---- the batched copy, against a library of our own with its signature


SHIM = """
#include <string.h>
#include <stddef.h>
struct location { int type, id; };
struct attributes { int order; struct location source, target; unsigned flags; };
static int wrong(struct attributes *a, size_t *first, size_t n) {
  return a->order != 1 || a->flags != 1 || first[0] != 0 || n != 1;
}
int %s(void **dst, void **src, size_t *size, size_t count, struct attributes *a, size_t *first, size_t n,
       %s void *stream) {
  if (wrong(a, first, n) || stream != (void *)77) return 1;
  for (size_t i = 0; i < count; i++) memcpy(dst[i], src[i], size[i]);
  return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(("version", "argument"), [(12080, "size_t *failed,"), (13000, "")])
def test_the_batched_copy_is_called_as_its_version_wants(version: int, argument: str, tmp_path: Path) -> None:
    (tmp_path / "shim.c").write_text(SHIM % ("cudaMemcpyBatchAsync", argument))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "shim.so", tmp_path / "shim.c"], check=True)
    batches = Batches(ctypes.CDLL(str(tmp_path / "shim.so")), version)
    source, target = np.arange(96, dtype=np.uint8), np.zeros(96, np.uint8)
    at = longs(0, 32, 64)
    batches.copy(target.ctypes.data + at, source.ctypes.data + at[::-1].copy(), longs(32, 32, 30), 77)
    assert (target == np.concatenate((source[64:], source[32:64], source[:30], [0, 0]))).all()
    with pytest.raises(RuntimeError, match="of 3 copies failed with error 1"):
        batches.copy(at, at, at, 78)


# ---- another thread's recording, against a driver of our own


DRIVER = """
static _Thread_local int mode = 0;
int cuThreadExchangeStreamCaptureMode(int *wanted) { int before = mode; mode = *wanted; *wanted = before; return 0; }
int mode_now(void) { return mode; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_recording_of_another_thread_is_let_be_for_as_long_as_a_call_takes(tmp_path: Path) -> None:
    (tmp_path / "driver.c").write_text(DRIVER)
    path = str(tmp_path / "driver.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, tmp_path / "driver.c"], check=True)
    mode_now = ctypes.CDLL(path).mode_now
    recordings = find_recordings(path)
    with recordings.let_be():
        assert mode_now() == 2
        with recordings.let_be():
            assert mode_now() == 2
        assert mode_now() == 2
    assert mode_now() == 0
    with pytest.raises(RuntimeError), recordings.let_be():
        raise RuntimeError
    assert mode_now() == 0


def test_without_a_driver_there_is_nothing_to_let_be() -> None:
    with find_recordings("libthere_is_none.so").let_be():
        pass


def test_no_runtime_no_batched_copy() -> None:
    """In a process of its own: another test's stand-in may be loaded in this one."""
    code = (
        "from tierkv.cuda.batches import find_batches; from tierkv.cuda.here import why_not\n"
        "assert find_batches() is None or why_not() is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
