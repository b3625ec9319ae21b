"""Offload and onboard of scattered pages: how fast, how fast both at once, how soon the first layer, and which
way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.gpu_rig import LAYERS, Contiguous, Rig, Size, gib_of, measured, rig
from bench.harness import Reach, Row
from tierkv.routes import RouteTable
from tierkv.streams import Route
from tierkv.units import KIB, MIB

SIZES = (Size(64 * KIB, 8), Size(256 * KIB, 4), Size(2 * MIB, 1))
ALL_SIZES = (Size(4 * KIB, 32), Size(16 * KIB, 16), *SIZES)

Found = tuple[Row, Sequence[float], Sequence[float]]

_LIMIT = "limit: cudaMemcpyAsync of one contiguous pinned buffer of the same size"


def copies(size: Size, total_bytes: int, rounds: int) -> Iterator[Found]:
    """Each way alone, and both at once; every byte is compared before."""
    with rig(size, total_bytes) as made:
        made.check()
        limit = Contiguous(made.bytes)
        name = f"{size.page_bytes // KIB}k"
        ways: tuple[tuple[str, tuple[str, ...], float], ...] = (
            ("offload", ("down",), 0.9),
            ("onboard", ("up",), 0.9),
            ("both", ("down", "up"), 0.85),
        )
        for what, directions, reach in ways:
            moved = made.bytes * len(directions)
            ours_s, limit_s = measured(
                lambda ways=directions: seconds(made, ways),  # type: ignore[misc]
                lambda ways=directions: limit.seconds(ways),  # type: ignore[misc]
                rounds,
            )
            row = Row(
                f"gpu_{what}_{name}",
                "gib_per_s",
                "GiB/s",
                f"{what}: {moved // MIB} MiB in scattered pages of {size.page_bytes // KIB} KiB; {_LIMIT}",
                Reach("ratio", ">=", reach),
            )
            yield row, [gib_of(moved, s) for s in ours_s], [gib_of(moved, s) for s in limit_s]


def seconds(made: Rig, ways: Sequence[str]) -> float:
    begun_s = time.perf_counter()
    calls = [made.onboard() if way == "up" else made.offload() for way in ways]
    for call in calls:
        call.wait()
    return time.perf_counter() - begun_s


def first_layer(total_bytes: int, rounds: int) -> Found:
    """When layer 0 may be computed on, beside its share of the whole."""
    with rig(SIZES[1], total_bytes) as made:

        def one() -> tuple[float, float]:
            begun_s = time.perf_counter()
            first: list[float] = []
            call = made.onboard(lambda group, layer: first.append(time.perf_counter() - begun_s))
            return first[0] if call.wait() and first else 0.0, call.took_s

        one()
        pairs = [one() for _ in range(2 * rounds)]
    row = Row(
        "gpu_first_layer",
        "ms",
        "ms",
        f"from the call of onboard until layer 0 of {LAYERS} is usable; limit: the whole onboard / {LAYERS}",
        Reach("ratio", "<=", 1.5),
    )
    return row, [first * 1e3 for first, _ in pairs], [whole * 1e3 / LAYERS for _, whole in pairs]


def routes(total_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """GiB/s of each route for each length of runs, each way: what ``tierkv.routes`` should say on this machine."""
    found: list[dict[str, Any]] = []
    for size in ALL_SIZES:
        rows: dict[str, dict[str, Any]] = {
            way: {"page_bytes": size.page_bytes, "way": way} for way in ("down", "up")
        }
        for route in Route:
            with rig(size, total_bytes // 2, RouteTable(((0, route),), ((0, route),))) as made:
                for way, row in rows.items():
                    seconds(made, (way,))
                    best_s = min(seconds(made, (way,)) for _ in range(max(2, rounds // 2)))
                    row[route.value] = gib_of(made.bytes, best_s)
        for row in rows.values():
            row["best"] = max((route.value for route in Route), key=row.__getitem__)
        found += rows.values()
    return found
