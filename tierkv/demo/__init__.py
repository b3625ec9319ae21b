"""The demo: a real pretrained model gets the KV cache of real texts back from every tier."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """``tierkv demo ...``: returns the exit status. Imports nothing before it is called."""
    from tierkv.demo.command import main as run

    return run(argv)
