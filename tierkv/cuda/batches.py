"""``cudaMemcpyBatchAsync``: many copies by the copy engines in one call. CuPy does not have it, so it is called in
the runtime library that torch has loaded. CUDA 12.8 and newer; the call has lost an argument in CUDA 13.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv.page_runs import Longs

_FIRST_VERSION = 12080
_WITHOUT_FAIL_INDEX = 13000
_IN_STREAM_ORDER = 1
"""cudaMemcpySrcAccessOrderStream: sources are read as the stream's order says."""
_BESIDE_COMPUTE = 1
"""cudaMemcpyFlagPreferOverlapWithCompute: by copy engines, not by a kernel."""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    ]


class Batches:
    """The batched copy of one runtime library. Thread-safe."""

    def __init__(self, library: Any, version: int) -> None:
        self._copy = library.cudaMemcpyBatchAsync
        self._copy.restype = ctypes.c_int
        self._has_fail_index = version < _WITHOUT_FAIL_INDEX
        self._attributes = _Attributes(_IN_STREAM_ORDER, _Location(0, 0), _Location(0, 0), _BESIDE_COMPUTE)
        self._first = (ctypes.c_size_t * 1)(0)

    def copy(self, dst: Longs, src: Longs, size: Longs, stream: int) -> None:
        """Hands in ``len(size)`` copies. ``stream`` is a ``cudaStream_t``, not the default one. The arrays may be
        given up when this returns. Raises ``RuntimeError``."""
        arguments: list[Any] = [
            ctypes.c_void_p(dst.ctypes.data),
            ctypes.c_void_p(src.ctypes.data),
            ctypes.c_void_p(size.ctypes.data),
            ctypes.c_size_t(len(size)),
            ctypes.byref(self._attributes),
            self._first,
            ctypes.c_size_t(1),
        ]
        failed = ctypes.c_size_t(0)
        if self._has_fail_index:
            arguments.append(ctypes.byref(failed))
        code = self._copy(*arguments, ctypes.c_void_p(stream))
        if code:
            raise RuntimeError(f"cudaMemcpyBatchAsync of {len(size)} copies failed with error {code}")


def find_batches() -> Batches | None:
    """The batched copy, if the runtime library that this process has loaded is new enough."""
    for path in _loaded_runtimes():
        try:
            library = ctypes.CDLL(path)
            version = ctypes.c_int(0)
            known = library.cudaRuntimeGetVersion(ctypes.byref(version)) == 0
        except (OSError, AttributeError):
            continue
        if known and version.value >= _FIRST_VERSION and hasattr(library, "cudaMemcpyBatchAsync"):
            return Batches(library, version.value)
    return None


def _loaded_runtimes() -> list[str]:
    """Files of this process's memory map that are a CUDA runtime library."""
    found = dict.fromkeys(
        line.split(maxsplit=5)[5]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libcudart" in line and len(line.split(maxsplit=5)) == 6
    )
    return [path for path in found if path.startswith("/")]
