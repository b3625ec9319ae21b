"""What tierkv says in vLLM's log: lines among vLLM's own, and one at the start with what is on, and where."""

from __future__ import annotations

import logging

from tierkv.config import Config, load_config
from tierkv.engines.vllm_options import Options
from tierkv.layout import Layout
from tierkv.units import format_bytes

log = logging.getLogger("tierkv")


def speak_as_vllm() -> None:
    """vLLM gives handlers to its own loggers alone, and a line of another that is no warning is seen nowhere. Where
    somebody has said what becomes of tierkv's lines, that stays."""
    own, its = logging.getLogger("tierkv"), logging.getLogger("vllm")
    if own.hasHandlers() or not its.handlers:
        return
    for handler in its.handlers:
        own.addHandler(handler)
    if own.level == logging.NOTSET:
        own.setLevel(its.getEffectiveLevel())


def say_what_is_on(layout: Layout, options: Options, socket_path: str) -> None:
    """What goes where, and how to look at it."""
    both = {"saved to": options.save, "loaded from": options.load}
    log.info(
        "vLLM: blocks of %d tokens (%s) are %s %s; tierkv status --socket %s shows what is there",
        layout.block_tokens,
        format_bytes(sum(part.payload_bytes for part in layout.parts)),
        " and ".join(does for does, on in both.items() if on),
        place_of(options),
        socket_path,
    )


def place_of(options: Options) -> str:
    """Whose memory it is, in words."""
    if options.socket is not None:
        return "a shared sidecar"
    return f"a private sidecar with {tiers_of(load_config(None, **options.settings))}"


def tiers_of(config: Config) -> str:
    tiers = [f"{format_bytes(config.host.capacity_bytes)} of host RAM"]
    if config.nvme is not None:
        tiers.append(f"{format_bytes(config.nvme.capacity_bytes)} in {config.nvme.path}")
    if config.valkey is not None:
        tiers.append("a Valkey server")
    return ", ".join(tiers)
