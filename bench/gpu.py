"""`python -m bench.gpu --json FILE`: copies between a GPU and host RAM beside one contiguous copy, in the same run.

    --rounds N     rounds of ours, limit, limit, ours (default 5)
    --mib N        bytes of each copy (default 512)

Needs torch, CuPy, numpy, msgpack, lz4, xxhash and an NVIDIA GPU; without one it says so in one line and ends well.
What the rows mean stands in the JSON ("definition"); `routes` there is the table of the three ways.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import Result, Row, spread
from bench.report import as_json, table
from tierkv.cuda.here import why_not
from tierkv.units import KIB, MIB


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="of ours, limit, limit, ours (default %(default)s)"
    )
    parser.add_argument(
        "--mib", type=int, default=512, metavar="N", help="of each copy (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    if (why := why_not()) is not None:
        print(f"bench.gpu: skipped: {why}")
        if options.json is not None:
            write(options.json, {"skipped": why})
        return 0
    return measure_all(options.rounds, options.mib * MIB, options.json)


def measure_all(rounds: int, total_bytes: int, target: Path | None) -> int:
    import torch

    from bench.gpu_copies import SIZES, copies, first_layer, routes
    from bench.gpu_kernels import kernels, matmul

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    results: list[Result] = []
    for size in SIZES:
        progress(f"pages of {size.page_bytes // KIB} KiB")
        results += [result_of(*found) for found in copies(size, total_bytes, rounds)]
    progress("layers")
    results.append(result_of(*first_layer(total_bytes, rounds)))
    progress("a matmul beside copies")
    results.append(result_of(*matmul(total_bytes, rounds)))
    progress("codecs")
    results += [result_of(*found) for found in kernels(rounds)]
    progress("the three routes")
    ways = routes(total_bytes, rounds)
    print(table(results, {}))
    print("\n" + ways_table(ways))
    if target is not None:
        write(target, {"gpu": torch.cuda.get_device_name(), "rows": as_json(results, {}), "routes": ways})
    return 0


def result_of(row: Row, ours: Sequence[float], limits: Sequence[float]) -> Result:
    """A row from its samples, two of each side for a round."""
    pairs = zip(ours[::2], ours[1::2], limits[::2], limits[1::2], strict=True)
    by_round = [(first + second) / (third + fourth) for first, second, third, fourth in pairs]
    return Result(
        row,
        statistics.median(ours),
        statistics.median(limits),
        spread(limits),
        len(by_round),
        1,
        statistics.median(by_round),
    )


def ways_table(ways: Sequence[dict[str, Any]]) -> str:
    """The table that `tierkv/routes.py` is to follow."""
    lines = [
        "page KiB  way   " + "".join(f"{name:>10}" for name in ("dma", "staged", "kernel")) + "  best (GiB/s)"
    ]
    for row in ways:
        figures = "".join(f"{row[name]:10.1f}" for name in ("dma", "staged", "kernel"))
        lines.append(f"{row['page_bytes'] // KIB:8}  {row['way']:5}{figures}  {row['best']}")
    return "\n".join(lines)


def write(target: Path, found: dict[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")


def progress(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
