"""The process with the model and the store: ``python -m tierkv.demo.child PARENT_PID LOADER``.

Each line of standard input is one call of an engine's method, as JSON: ``["flush", {"tier": "nvme"}]``. Lines on
standard output are ``["say", text]`` and ``["layers", done, of]`` while it works, and then ``["done", value]`` or
``["failed", text]``. It ends when its input does, and when its parent dies in whatever way.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
from importlib import import_module
from typing import IO, Any

from tierkv.demo.engine import Loaded, LocalEngine
from tierkv.errors import TierKVError

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    parent, loader = arguments
    _end_with(int(parent))
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no message of ours

    def tell(*message: object) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    try:
        engine = LocalEngine(_load(loader, tell), lambda done, of: tell("layers", done, of))
    except (TierKVError, ImportError, OSError) as error:
        tell("failed", str(error))
        return 1
    tell("done", None)
    try:
        return _serve(engine, sys.stdin, tell)
    finally:
        engine.close(forget=False)


def _serve(engine: LocalEngine, calls: IO[str], tell: Any) -> int:
    for line in calls:
        verb, options = json.loads(line)
        try:
            result = getattr(engine, verb)(**options)
        except (TierKVError, OSError, TimeoutError) as error:
            tell("failed", str(error))
            return 1
        tell("done", dataclasses.asdict(result) if dataclasses.is_dataclass(result) else result)  # type: ignore[arg-type]
    return 0


def _load(loader: str, tell: Any) -> Loaded:
    module, _, name = loader.partition(":")
    loaded: Loaded = getattr(import_module(module), name)(lambda text: tell("say", text))
    return loaded


def _end_with(parent: int) -> None:
    """The kernel kills this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we could ask for that
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
