"""An engine in a process of its own, as its parent sees it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tierkv.demo.answers import Answer, Flushed, Layers, Opened, Say
from tierkv.errors import TierKVError

_TICK_S = 0.2
_SILENCE_S = 600.0
"""A process that says nothing for so long is stuck: a layer of a long prompt takes a second."""
_END_S = 15.0
_SERVER_S = 10.0
_MAX_TOLD = 2000


class EngineFailed(TierKVError):
    """The process with the model and the store could not do what it was asked, or is gone."""


class RemoteEngine:
    """An ``Engine`` in a child process. One thread uses it; end it with ``end`` or ``kill``.

    ``folder`` takes its log and all temporary files, those of the embedded Valkey server too. ``tick`` is called a few
    times a second while a call is waited for. Ctrl-C does not reach the child: whoever holds this object ends it.
    """

    def __init__(self, loader: str, folder: Path, say: Say, layers: Layers, tick: Callable[[], None]) -> None:
        """Starts the process and loads the model. Raises ``EngineFailed``."""
        self._folder = folder
        self._say, self._layers, self._tick = say, layers, tick
        self._log = folder / "engine.log"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TIERKV_")}
        environment = {
            **inherited,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TMPDIR": str(folder),
            "HF_HUB_OFFLINE": "1",
        }
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tierkv.demo.child", str(os.getpid()), loader],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,
                env=environment,
            )
        self._half = b""
        ready = False
        try:
            self._wait()
            ready = True
        finally:
            if not ready:
                self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    # -- the calls ------------------------------------------------------------------------------------------------

    def open(self, salt: str, settings: Mapping[str, Any]) -> Opened:
        return Opened(**self._call("open", salt=salt, settings=dict(settings)))

    def shared_tokens(self, file: str, questions: tuple[str, ...]) -> int:
        return int(self._call("shared_tokens", file=file, questions=questions))

    def compute(self, file: str, question: str) -> Answer:
        return Answer.from_json(self._call("compute", file=file, question=question))

    def ask(self, file: str, question: str) -> Answer:
        return Answer.from_json(self._call("ask", file=file, question=question))

    def flush(self, tier: str, timeout_s: float) -> Flushed:
        return Flushed(**self._call("flush", tier=tier, timeout_s=timeout_s))

    def evict(self, tier: str) -> int:
        return int(self._call("evict", tier=tier))

    def settle(self, timeout_s: float) -> bool:
        return bool(self._call("settle", timeout_s=timeout_s))

    def counters(self) -> Mapping[str, int]:
        found: dict[str, int] = self._call("counters")
        return found

    def close(self, *, forget: bool) -> None:
        self._call("close", forget=forget)

    def _call(self, verb: str, **options: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([verb, options]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None
        return self._wait()

    def _wait(self) -> Any:
        """Until the call is done."""
        end_s = time.monotonic() + _SILENCE_S
        while True:
            for kind, *told in self._messages():
                end_s = time.monotonic() + _SILENCE_S
                match kind:
                    case "say":
                        self._say(*told)
                    case "layers":
                        self._layers(*told)
                    case "failed":
                        raise EngineFailed(told[0])
                    case _:
                        return told[0]
            self._tick()
            if time.monotonic() > end_s:
                raise EngineFailed(f"the process with the model said nothing for {_SILENCE_S:.0f} s")

    def _messages(self) -> list[list[Any]]:
        """What has come within one tick."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        if not select.select([pipe], [], [], _TICK_S)[0]:
            return []
        piece = os.read(pipe, 65_536)
        if not piece:
            raise self._gone()
        *lines, self._half = (self._half + piece).split(b"\n")
        return [json.loads(line) for line in lines]

    def _gone(self) -> EngineFailed:
        self._process.wait(_END_S)
        said = self._log.read_text("utf-8", "replace")[-_MAX_TOLD:].strip()
        status = self._process.returncode
        return EngineFailed(
            f"the process with the model ended with status {status}: {said or 'it said nothing'}"
        )

    # -- its end --------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Lets it close its store and go; kills it when it does not."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def kill(self) -> int:
        """``kill -9``, without a word before. Returns its exit status when it and its Valkey server are gone."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
        status = self._process.wait(_END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._server_gone()
        return status

    def _server_gone(self) -> None:
        """The embedded server ends with its owner; its folder is the last thing that goes."""
        end_s = time.monotonic() + _SERVER_S
        while any(self._folder.glob("tierkv-valkey-*")):
            if time.monotonic() > end_s:
                raise EngineFailed("the embedded Valkey server has outlived its owner")
            time.sleep(0.01)
