"""Calls of ours while an engine records a CUDA graph.

As torch and vLLM record them, what *any* thread of the process asks of the GPU in the meantime may be refused, and may
spoil the recording, unless the thread has said that it minds no recording (``cuThreadExchangeStreamCaptureMode``). Ours
pin memory and look at events for seconds after an engine's start, when it records, and never on a stream that is
recorded: so they say so for as long as a call takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""
_LIBRARY = "libcuda.so.1"


class Recordings:
    """Thread-safe. ``library``: the driver, or ``None`` where there is none: then nothing is recorded either."""

    def __init__(self, library: Any) -> None:
        self._exchange = getattr(library, "cuThreadExchangeStreamCaptureMode", None)
        if self._exchange is not None:
            self._exchange.restype = ctypes.c_int

    @contextmanager
    def let_be(self) -> Iterator[None]:
        """What this thread asks of the GPU meanwhile neither fails for another thread's recording nor spoils it."""
        if self._exchange is None:
            yield
            return
        mode = ctypes.c_int(_RELAXED)
        self._exchange(ctypes.byref(mode))  # what it was before is in ``mode`` now
        try:
            yield
        finally:
            self._exchange(ctypes.byref(mode))


def find_recordings(library: str = _LIBRARY) -> Recordings:
    """Those of this machine's driver."""
    try:
        return Recordings(ctypes.CDLL(library))
    except OSError:
        return Recordings(None)
