"""What the demo's processes tell each other: plain values, which cross a pipe as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Answer:
    """What the model said to one question, how long it took, and what the store did for it."""

    question: str
    text: str
    tokens: tuple[int, ...]
    """Those that were generated."""
    prompt_tokens: int
    first_token_s: float
    """From the question to the first new token."""
    whole_s: float
    """From the question to the end of the answer."""
    reused_tokens: int = 0
    reused_bytes: int = 0
    restore_s: float = 0.0
    """To find, load and copy them; a part of ``first_token_s``."""
    known_tokens: int = 0
    """Of the prompt, by the store's index, before the question was asked."""
    known: Mapping[str, int] = field(default_factory=dict)
    """By tier: how many of these blocks it held then."""
    known_blocks: int = 0
    read: Mapping[str, int] = field(default_factory=dict)
    """By tier: blocks that were read from it for this answer, by the store's counters."""
    no_room_blocks: int = 0
    """Blocks that were not loaded because they found no room in host RAM."""
    uncacheable: str | None = None
    """Why the store was left out."""

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> Answer:
        return Answer(**{**told, "tokens": tuple(told["tokens"])})


@dataclass(frozen=True)
class Opened:
    """A store that was opened."""

    block_tokens: int
    token_bytes: int
    """Of keys and values."""
    found_blocks: int
    """What the NVMe tier found in its directory."""


@dataclass(frozen=True)
class Flushed:
    """What was written to a tier on demand, in blocks."""

    written: int
    failed: int


class Engine(Protocol):
    """A model with a store behind it. In the demo it is a process of its own (``tierkv.demo.process``), because it is
    going to be killed. Each method returns when the work is done."""

    @property
    def pid(self) -> int: ...

    def open(self, salt: str, settings: Mapping[str, Any]) -> Opened:
        """Opens a store with these settings of ``tierkv.open``; the salt keeps its blocks apart from all others."""
        ...

    def shared_tokens(self, file: str, questions: tuple[str, ...]) -> int:
        """How many tokens the prompts about a text have in common, in whole blocks."""
        ...

    def compute(self, file: str, question: str) -> Answer:
        """An answer without any store: what all others are held against."""
        ...

    def ask(self, file: str, question: str) -> Answer:
        """An answer with the store. What is new is in host RAM when this returns."""
        ...

    def flush(self, tier: str, timeout_s: float) -> Flushed: ...

    def evict(self, tier: str) -> int:
        """Takes from a tier all that another has too; returns how many blocks."""
        ...

    def settle(self, timeout_s: float) -> bool:
        """Gives the store a moment, as it has between the questions of people: until it has nothing left to clean."""
        ...

    def counters(self) -> Mapping[str, int]: ...

    def close(self, *, forget: bool) -> None:
        """Closes the store. ``forget``: first clears what it holds, for tiers that outlive it."""
        ...

    def kill(self) -> int:
        """``kill -9``; returns the process's exit status."""
        ...


Say = Callable[[str], None]
Layers = Callable[[int, int], None]
"""``layers(done, of)``: how far a long computation is."""
