"""What a token costs to compute and to load: the assumptions of ``tierkv replay`` and ``tierkv plan``, each with its
source and the option that changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tierkv.replay.geometry import OPTION, Geometry, Numbers
from tierkv.replay.hardware import LINK_SHARE, Gpu
from tierkv.units import format_bytes


class Assumption(NamedTuple):
    """One figure that nobody has measured here."""

    name: str
    value: float | str
    source: str
    option: str


@dataclass(frozen=True)
class Costs:
    """Of one model on one kind of GPU. Speeds in bytes a second."""

    geometry: Geometry
    gpu_word: str
    gpus: int
    gpu: Gpu
    utilisation: float
    prefill_tokens_per_s: float | None
    """As it was measured; ``None``: reckoned from the operations."""
    link_bytes_per_s: float
    """From host RAM to the engine's pages, all GPUs together."""
    read_bytes_per_s: Mapping[str, float]
    """Of the colder tiers, into host RAM."""
    latency_s: Mapping[str, float]
    block_bytes_given: int | None
    asked: frozenset[str]
    """Options that were given."""

    def block_bytes(self, block_tokens: int) -> int:
        """What one block takes in every tier."""
        if self.block_bytes_given is not None:
            return self.block_bytes_given
        return max(1, round(self.geometry.token_bytes * block_tokens))

    def compute_s(self, first: Numbers, stop: Numbers) -> Numbers:
        """For the tokens from place ``first`` up to ``stop``, on all GPUs that serve the model together."""
        if self.prefill_tokens_per_s is not None:
            return (stop - first) / self.prefill_tokens_per_s
        return self.geometry.flops(first, stop) / (self.gpus * self.gpu.dense_flops_per_s * self.utilisation)

    def mean_token_s(self, prompt_tokens: float) -> float:
        """For one token of a prompt of that length."""
        length = np.array([max(1.0, prompt_tokens)])
        return float(self.compute_s(np.zeros(1), length)[0] / length[0])

    def link_s(self, tokens: Numbers, block_tokens: int) -> Numbers:
        """From host RAM to the engine, for a prompt's first so many tokens."""
        as_given = self.block_bytes(block_tokens) / (self.geometry.token_bytes * block_tokens)
        return self.geometry.bytes_of(tokens) * as_given / self.link_bytes_per_s

    def read_s(self, tier: str, size_bytes: Numbers) -> Numbers:
        """From a colder tier into host RAM; nothing takes no time."""
        took = self.latency_s[tier] + size_bytes / self.read_bytes_per_s[tier]
        return np.where(size_bytes > 0, took, 0.0)

    def assumptions(self, block_tokens: int, tiers: tuple[str, ...]) -> list[Assumption]:
        """All that the figures rest on."""
        found = [
            Assumption(
                "model", f"{self.geometry.name}: {self.geometry.described()}", "its config.json", OPTION
            ),
            Assumption(
                "block_bytes",
                self.block_bytes(block_tokens),
                "given" if self.block_bytes_given is not None else f"{block_tokens} tokens of the model",
                "--block-bytes",
            ),
        ]
        if self.prefill_tokens_per_s is not None:
            found.append(
                Assumption(
                    "prefill_tokens_per_s", self.prefill_tokens_per_s, "given", "--prefill-tokens-per-s"
                )
            )
        else:
            peak = f"{self.gpus} x {self.gpu.dense_flops_per_s / 1e12:,.0f} TFLOP/s dense bf16 (data sheet)"
            found += [
                Assumption("gpu", self.gpu_word, peak, "--gpu"),
                self._said(
                    "utilisation",
                    self.utilisation,
                    "Grattafiori and others 2024: 0.38 to 0.43 in training; measure with --prefill-tokens-per-s",
                ),
            ]
        sources = {
            "nvme": "one PCIe 4 drive; measure with python -m bench.edges --only nvme",
            "valkey": "a network of 25 Gbit/s at 80 %",
        }
        for tier in tiers:
            found.append(self._said(f"{tier}_bytes_per_s", self.read_bytes_per_s[tier], sources[tier]))
            found.append(self._said(f"{tier}_latency_s", self.latency_s[tier], "assumed"))
        return found

    def link_assumption(self) -> Assumption:
        """For the way from host RAM to the engine."""
        return self._said(
            "link_bytes_per_s",
            self.link_bytes_per_s,
            f"{LINK_SHARE:.0%} of PCIe's {self.gpu.link_bytes_per_s / 1e9:.0f} GB/s, {self.gpus} GPU",
        )

    def _said(self, name: str, value: float, source: str) -> Assumption:
        option = "--" + name.replace("_", "-")
        return Assumption(name, value, "given" if option in self.asked else source, option)


def assumption_lines(found: list[Assumption]) -> list[str]:
    """For people: what is assumed, from where, and the option that changes it."""
    lines = ["assumed (each option changes it):"]
    for one in found:
        if isinstance(one.value, str):
            value = one.value
        elif one.name.endswith("bytes_per_s"):
            value = f"{one.value / 1e9:g} GB/s"
        elif one.name == "block_bytes":
            value = format_bytes(one.value)
        else:
            value = f"{one.value:,g}"
        lines.append(f"  {one.option}: {value} ({one.source})")
    return lines
