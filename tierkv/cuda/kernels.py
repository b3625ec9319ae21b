"""The kernels of ``copies.cu`` and ``codecs.cu``, compiled on first use and kept by CuPy in its folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tierkv.errors import MissingDependency

FOLDER = Path(__file__).parent
SOURCES = ("copies", "codecs")
COMPILE_OPTIONS = ("-std=c++17",)


class Kernels:
    """The kernels of one source file. Thread-safe. Raises ``MissingDependency`` without CuPy."""

    def __init__(self, source: str) -> None:
        if find_spec("cupy") is None:
            raise MissingDependency("cuda", source, "cupy", "cuda")
        import cupy

        code = (FOLDER / f"{source}.cu").read_text()
        includes = tuple(f"-I{folder}" for folder in header_folders()) if "#include" in code else ()
        self._source = source
        self._compile_error = cupy.cuda.compiler.CompileException
        self._module = cupy.RawModule(code=code, options=COMPILE_OPTIONS + includes)
        self._lock = threading.Lock()
        self._found: dict[tuple[int, str], Any] = {}

    def get(self, name: str, device: int) -> Any:
        """A kernel by name, to be called with grid, block and arguments while ``device`` is the current one. Raises
        ``RuntimeError`` when it cannot be compiled here."""
        with self._lock:
            kernel = self._found.get((device, name))
            if kernel is None:
                try:
                    kernel = self._found[device, name] = self._module.get_function(name)
                except self._compile_error as error:
                    raise RuntimeError(
                        f"{self._source}.cu does not compile with this CuPy: {error}"
                    ) from error
            return kernel


def header_folders() -> Iterator[str]:
    """Where CUDA's own headers may be: the toolkit's folder, or the packages that pip installs."""
    roots = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    for root in filter(None, roots):
        if (Path(root) / "include" / "cuda_fp8.h").is_file():
            yield str(Path(root) / "include")
    spec = find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for header in sorted(Path(place).glob("*/include/cuda_fp8.h")):
            yield str(header.parent)
