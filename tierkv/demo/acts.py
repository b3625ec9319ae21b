"""The two acts of the demo.

In the first, one long text is asked about again and again, and each time another tier has to give its keys and values
back: the hotter ones were emptied before. In the second, host RAM is too small for the texts, and the store has to see
for itself how it gets along.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierkv.demo.answers import Answer, Engine
from tierkv.demo.questions import HANDBOOK, SHORTER, Reading
from tierkv.demo.screen import Screen
from tierkv.demo.verdicts import (
    HOST,
    NAMES,
    NVME,
    VALKEY,
    Row,
    computed_all,
    differs,
    served_by,
    served_by_any,
    under_pressure,
)
from tierkv.demo.words import seconds
from tierkv.units import format_bytes

EMBEDDED = "embedded"
EMPTY, AFTER_KILL = "empty store", "NVMe, after kill -9"
_TTL = "15 min"
"""For what an interrupted demo leaves on somebody's Valkey server."""
_KILLED = -9
_PAUSE_S = 5.0
_WATERMARKS = {"host_low_watermark": 0.6}
"""The texts are large for this host RAM, so most of it is kept free or clean."""


@dataclass(frozen=True)
class Stage:
    """Texts and sizes."""

    folder: Path
    """For the NVMe tier's directories."""
    valkey_url: str = EMBEDDED
    long: Reading = HANDBOOK
    shorter: tuple[Reading, ...] = SHORTER
    host: str = "256 MiB"
    nvme: str = "512 MiB"
    small_host: str = "128 MiB"
    small_nvme: str = "256 MiB"
    valkey_memory: str = "768 MiB"
    flush_s: float = 30.0
    salt: str = field(default_factory=lambda: secrets.token_hex(8))
    """New for each run, so that an old run's blocks on a Valkey server are not found."""

    def settings(self, act: str, host: str, nvme: str) -> Mapping[str, Any]:
        embedded = {"valkey_embedded_memory": self.valkey_memory} if self.valkey_url == EMBEDDED else {}
        return {
            **embedded,
            "host_capacity": host,
            "nvme_path": str(self.folder / act),
            "nvme_capacity": nvme,
            "nvme_min_free": "64 MiB",
            "valkey_url": self.valkey_url,
            "valkey_ttl": _TTL,
            "valkey_timeout": "10 s",
        }


@dataclass
class Result:
    """What the demo found out."""

    rows: list[Row] = field(default_factory=list)
    """The first act."""
    pressed: list[Row] = field(default_factory=list)
    """The second: each text, the first time and the second."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """The store's, at the end of the second act."""
    problems: list[str] = field(default_factory=list)
    """Those that belong to no row."""
    block_tokens: int = 0
    token_bytes: int = 0
    """Of keys and values."""
    text_tokens: int = 0
    """Of the long text, in whole blocks: what every prompt about it begins with."""

    @property
    def all_problems(self) -> list[str]:
        return [
            f"{row.text}, {row.source}: {problem}"
            for row in [*self.rows, *self.pressed]
            for problem in row.problems
        ] + [*self.problems]


class Play:
    """Plays the acts. ``start`` gives a new engine; whoever made it ends what is left of it."""

    def __init__(self, stage: Stage, start: Callable[[], Engine], screen: Screen) -> None:
        self.stage = stage
        self.result = Result()
        self._start = start
        self._screen = screen
        self._computed: dict[tuple[str, str], Answer] = {}
        self._questions = iter(stage.long.questions)

    def run(self) -> Result:
        engine = self._tiers_in_turn()
        self._pressure(engine)
        return self.result

    # -- act one --------------------------------------------------------------------------------------------------

    def _tiers_in_turn(self) -> Engine:
        stage, screen = self.stage, self._screen
        screen.headline(f"Act 1. One long text, the {stage.long.name}, and another question for each tier")
        settings = stage.settings("act-1", stage.host, stage.nvme)
        with screen.step("starting a process with the model") as step:
            engine = self._start()
            opened = engine.open(stage.salt, settings)
            step.done(f"process {engine.pid}")
        self.result.block_tokens, self.result.token_bytes = opened.block_tokens, opened.token_bytes
        self.result.text_tokens = shared = engine.shared_tokens(stage.long.file, stage.long.questions)
        whole = format_bytes(shared * opened.token_bytes)
        screen.note(f"the text is {shared} tokens, its keys and values are {whole}")

        self._first_act(engine, EMPTY, computed_all)
        self._first_act(engine, "host RAM", lambda answer: served_by(HOST, answer, shared))
        self._flush(engine, NVME)
        self._flush(engine, VALKEY)
        self._evict(engine, HOST)
        self._first_act(engine, "NVMe", lambda answer: served_by(NVME, answer, shared))
        self._evict(engine, HOST, NVME)
        name = "Valkey (embedded)" if stage.valkey_url == EMBEDDED else "Valkey"
        self._first_act(engine, name, lambda answer: served_by(VALKEY, answer, shared))
        self._flush(engine, NVME)
        engine = self._killed_and_started(engine, settings)
        self._questions = iter(
            stage.long.questions
        )  # the first again: what was said before the kill is said after it
        self._first_act(engine, AFTER_KILL, lambda answer: served_by(NVME, answer, shared))
        engine.close(forget=stage.valkey_url != EMBEDDED)
        shutil.rmtree(settings["nvme_path"], ignore_errors=True)
        return engine

    def _first_act(self, engine: Engine, source: str, check: Callable[[Answer], list[str]]) -> None:
        question = next(self._questions)
        self._screen.question(question)
        self.result.rows.append(self._asked(engine, source, self.stage.long, question, check))

    def _asked(
        self,
        engine: Engine,
        source: str,
        reading: Reading,
        question: str,
        check: Callable[[Answer], list[str]],
    ) -> Row:
        computed = self._computed.get((reading.file, question))
        if computed is None:
            with self._screen.step("without a store") as step:
                computed = engine.compute(reading.file, question)
                step.done(f"{seconds(computed.first_token_s)} to the first token")
            self._computed[reading.file, question] = computed
        with self._screen.step(source) as step:
            answer = engine.ask(reading.file, question)
            problems = (*differs(answer, computed), *check(answer))
            row = Row(source, reading.name, answer, computed, problems)
            reused = f", {answer.reused_tokens} tokens reused" if answer.reused_tokens else ""
            step.done(f"{seconds(answer.first_token_s)} to the first token{reused}")
        self._screen.answer(answer.text)
        for problem in problems:
            self._screen.problem(problem)
        return row

    def _flush(self, engine: Engine, tier: str) -> None:
        with self._screen.step(f"flush to {NAMES[tier]}") as step:
            flushed = engine.flush(tier, self.stage.flush_s)
            step.done(f"{flushed.written} blocks written")
        if flushed.failed:
            self._wrong(f"flush to {NAMES[tier]}: {flushed.failed} blocks could not be written")

    def _evict(self, engine: Engine, *tiers: str) -> None:
        with self._screen.step(f"evict from {' and '.join(NAMES[tier] for tier in tiers)}") as step:
            step.done(f"{' and '.join(str(engine.evict(tier)) for tier in tiers)} blocks gone")

    def _killed_and_started(self, engine: Engine, settings: Mapping[str, Any]) -> Engine:
        with self._screen.step(f"kill -9 {engine.pid}") as step:
            status = engine.kill()
            step.done(f"it ended with status {status}")
        if status != _KILLED:
            self._wrong(f"process {engine.pid} ended with status {status}, not by the signal")
        with self._screen.step("starting a new process on the same directory") as step:
            started = self._start()
            opened = started.open(self.stage.salt, settings)
            step.done(f"process {started.pid} found {opened.found_blocks} blocks on NVMe")
        return started

    # -- act two --------------------------------------------------------------------------------------------------

    def _pressure(self, engine: Engine) -> None:
        stage, screen = self.stage, self._screen
        screen.headline(f"Act 2. {len(stage.shorter) + 1} texts in turn, and {stage.small_host} of host RAM")
        settings = stage.settings("act-2", stage.small_host, stage.small_nvme)
        engine.open(f"{stage.salt}-2", {**settings, **_WATERMARKS})
        texts = (stage.long, *stage.shorter)
        for again in (False, True):
            for reading in texts:
                screen.question(f"{reading.name}: {reading.questions[0]}")
                check = served_by_any if again else computed_all
                source = "the second time" if again else "the first time"
                self.result.pressed.append(self._asked(engine, source, reading, reading.questions[0], check))
                engine.settle(_PAUSE_S)
        self.result.counters = engine.counters()
        for problem in under_pressure(self.result.counters):
            self._wrong(problem)
        engine.close(forget=stage.valkey_url != EMBEDDED)

    def _wrong(self, problem: str) -> None:
        self.result.problems.append(problem)
        self._screen.problem(problem)
