"""What must be true of an answer: the same words as without a store, from the tier that should have served them.

Each function returns what is wrong, in sentences; nothing means that all is well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tierkv.demo.answers import Answer

HOST, NVME, VALKEY = "host", "nvme", "valkey"
TIERS = (HOST, NVME, VALKEY)
NAMES = {HOST: "host RAM", NVME: "NVMe", VALKEY: "Valkey"}


@dataclass(frozen=True)
class Row:
    """One answer beside what the model says, and how long it takes, without a store."""

    source: str
    text: str
    """The name of what was asked about."""
    answer: Answer
    computed: Answer
    problems: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return self.answer.tokens == self.computed.tokens

    @property
    def speed_up(self) -> float:
        return self.computed.first_token_s / self.answer.first_token_s


def differs(answer: Answer, computed: Answer) -> list[str]:
    if answer.tokens == computed.tokens:
        return []
    return [f"the output differs: {answer.text!r}, and without a store {computed.text!r}"]


def computed_all(answer: Answer) -> list[str]:
    """For a store that has nothing yet."""
    problems = []
    if answer.uncacheable:
        problems.append(f"nothing was stored: {answer.uncacheable}")
    if answer.reused_tokens:
        problems.append(f"{answer.reused_tokens} tokens came from a store that should have been empty")
    return problems


def served_by(tier: str, answer: Answer, at_least_tokens: int) -> list[str]:
    """That this tier held all that was found, no hotter one held any of it, and that it was read from there. What a
    colder tier knew of the question itself, beyond that, may be read from that one: a server of its own outlives a
    ``kill -9``, and still has the end of a prompt that is sent again."""
    problems = []
    hotter = TIERS[: TIERS.index(tier)]
    for other in hotter:
        if held := answer.known.get(other, 0):
            problems.append(f"{NAMES[other]} still held {held} blocks when {NAMES[tier]} should have served")
    held = answer.known.get(tier, 0)
    if held < answer.known_blocks or not held:
        problems.append(f"{NAMES[tier]} held {held} of {answer.known_blocks} blocks before the question")
    if answer.reused_tokens < at_least_tokens:
        problems.append(
            f"{answer.reused_tokens} tokens were reused of the {at_least_tokens} that all prompts share"
        )
    wanted = {} if tier == HOST else {tier: answer.known_blocks}
    colder = TIERS[TIERS.index(tier) + 1 :]
    beyond = sum(answer.read.get(other, 0) for other in colder)
    here = {other: blocks for other, blocks in answer.read.items() if other not in colder}
    if here != wanted or beyond > _blocks_beyond(answer):
        problems.append(
            f"blocks were read from {_told(answer.read)}, and should have been from {_told(wanted)}"
        )
    return problems


def _blocks_beyond(answer: Answer) -> int:
    """How many blocks were reused that the index did not have before the question."""
    tokens = answer.reused_tokens - answer.known_tokens
    return tokens * answer.known_blocks // answer.known_tokens if answer.known_tokens else 0


def served_by_any(answer: Answer) -> list[str]:
    """For a store whose host RAM is too small: what it said it had, it gave, as far as there was room for it."""
    if not answer.known_blocks:
        return ["no tier had any of it, though it was asked about before"]
    if answer.reused_tokens < answer.known_tokens and not answer.no_room_blocks:
        return [f"{answer.reused_tokens} tokens were reused of {answer.known_tokens} that were in the tiers"]
    return [] if answer.reused_tokens else ["nothing was reused"]


def under_pressure(counters: Mapping[str, int]) -> list[str]:
    """That watermarks, cleaning, eviction and promotion have really run."""
    never = {
        f"written_blocks_total/{NVME}/done": "no block was written to NVMe ahead of need",
        f"evicted_blocks_total/{HOST}/room": "no block was evicted from host RAM to make room",
        f"read_blocks_total/{NVME}/done": "no block was promoted from NVMe",
    }
    return [what for name, what in never.items() if not counters.get(name)]


def _told(read: Mapping[str, int]) -> str:
    return ", ".join(f"{NAMES.get(tier, tier)} ({count})" for tier, count in read.items()) or "no colder tier"
