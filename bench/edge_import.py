"""Row ``import_tierkv``: what `import tierkv` adds to the start of an interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tierkv
from bench.harness import Reach, Row, Sample, Settings, Sides

RUNS = 3


class ImportTierkv:
    name = "import_tierkv"
    rows = (
        Row(
            "import_tierkv",
            "ms",
            "ms",
            "wall time of `python -c 'import tierkv'`, start to exit; limit: `python -c pass`; excess is value - limit",
            Reach("excess", "<=", 60),
        ),
    )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        # Both sides get the same path, so that finding the package is all that differs. Bytecode is warm: the
        # harness runs each side once before it counts.
        root = str(Path(tierkv.__file__).parent.parent)
        environment = {**os.environ, "PYTHONPATH": root}
        with tempfile.TemporaryDirectory() as elsewhere:

            def run(code: str) -> Sample:
                start_s = time.perf_counter()
                for _ in range(RUNS):
                    subprocess.run([sys.executable, "-c", code], check=True, cwd=elsewhere, env=environment)
                return {"ms": (time.perf_counter() - start_s) * 1e3 / RUNS}

            yield Sides(lambda: run("import tierkv"), lambda: run("pass"))
