"""``tierkv demo``: sets the stage, plays, reports, and leaves nothing behind but the picture."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tierkv.config import load_config
from tierkv.demo import chart
from tierkv.demo.acts import EMBEDDED, Play, Result, Stage
from tierkv.demo.answers import Engine
from tierkv.demo.engine import LOADER
from tierkv.demo.model import find_gguf
from tierkv.demo.process import RemoteEngine
from tierkv.demo.report import as_json, tables
from tierkv.demo.screen import Screen
from tierkv.errors import ConfigError

OK, FAILED = 0, 1
CHART = "tierkv-demo.png"


def main(argv: Sequence[str]) -> int:
    """Exit status 0 when every output was equal and every tier served that should have, else 1."""
    options = _options(argv)
    find_gguf()  # before anything takes time
    chart.check(options.chart)
    return play(options, LOADER)


def play(options: argparse.Namespace, loader: str, **changes: Any) -> int:
    """The demo with another model: ``loader`` is ``module:function``, see ``tierkv.demo.engine.load``. ``changes`` are
    those to the ``Stage``."""
    for path in (options.chart, options.json):
        if path is not None:
            _writable(path)
    screen = Screen(sys.stdout, redraw=sys.stdout.isatty())
    with ExitStack() as stack:
        stack.enter_context(_signals_end_it())
        folder = stack.enter_context(_folder(options.dir))
        stage = Stage(folder, options.valkey, **changes)
        for host, nvme in ((stage.host, stage.nvme), (stage.small_host, stage.small_nvme)):
            load_config(
                **stage.settings("check", host, nvme)
            )  # wrong settings are told before the model is loaded

        def start() -> Engine:
            engine = RemoteEngine(loader, folder, screen.say, screen.layers, screen.tick)
            stack.callback(engine.end)
            return engine

        result = Play(stage, start, screen).run()
    chart.draw(options.chart, stage, result)
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(stage, result, screen.elapsed_s), indent=1) + "\n")
    print(f"\n{tables(stage, result)}")
    for problem in result.all_problems:
        print(f"WRONG: {problem}")
    print(f"picture: {options.chart}\n{_verdict(result)}; it took {screen.elapsed_s:.0f} s")
    return FAILED if result.all_problems else OK


def _verdict(result: Result) -> str:
    if result.all_problems:
        return f"{len(result.all_problems)} things went wrong"
    return "every output was the same as without a store, and every tier served"


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tierkv demo",
        description="A real model answers questions about texts. The keys and values of a text go through host RAM, "
        "NVMe and Valkey, and come back from each instead of being computed again. Exit status 0 when every answer was "
        "the same as without a store and every tier served that should have, else 1.",
    )
    parser.add_argument(
        "--valkey",
        metavar="URL",
        default=EMBEDDED,
        help="a server, as valkey://host:6379; what is written to it is cleared again (default: one is started)",
    )
    parser.add_argument(
        "--dir",
        metavar="DIR",
        type=Path,
        help="where the NVMe tier's temporary directory is made, on a fast disk",
    )
    parser.add_argument(
        "--chart", metavar="PNG", type=Path, default=Path(CHART), help=f"the picture (default: {CHART})"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all that was measured to this file")
    return parser.parse_args(argv)


def _writable(path: Path) -> None:
    """Raises ``ConfigError`` for a file that could not be written."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError("demo", str(path), "this file cannot be written; name another one")


@contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    """A temporary directory. By default on a disk: ``/tmp`` is often only RAM."""
    if parent is None:
        parent = Path(tempfile.gettempdir() if "TMPDIR" in os.environ else "/var/tmp")
        if not os.access(parent, os.W_OK):
            parent = Path(tempfile.gettempdir())
    try:
        folder = Path(tempfile.mkdtemp(prefix="tierkv-demo-", dir=parent))
    except OSError as error:
        raise ConfigError("demo", str(parent), f"no directory can be made there: {error.strerror}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _signals_end_it() -> Iterator[None]:
    """A hang-up or a polite request to end is taken like Ctrl-C, so that everything is cleaned up."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {name: signal.signal(name, interrupt) for name in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
