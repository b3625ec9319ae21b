"""Every policy on every trace and capacity, through the replayer: ``python -m bench.policies --json FILE``.

The JSON holds one row for each cell and, beside them, the rows by which the default is judged:

- ``worst_below_leaf_lru_points``: the default against leaf-first LRU in the worst of all cells, in points of the block
  hit rate, negative where it loses;
- ``gap_closed_conv_a_1_to_5``: (default - LRU) / (optimum - LRU) in percent, mean over 1, 2 and 5 % on conv_a. The
  policy was tuned on the first half of each trace, so the value is that of the second half; ``whole`` stands beside it;
- ``nvme_writes_saved_conv_a_small``: how many times fewer writes to NVMe of 1 to 5 %, behind host RAM of 1 %, the
  default with ``nvme.admission = "density"`` makes than LRU written through, in the worst cell; ``points`` is what its
  hits gain at least;
- ``replay_refs_per_s``: block references a second of the replayer with LRU at 5 %, in the slowest of the traces;
- ``time_beside_ordered_dict_lru``: time of the default beside that of an LRU made of an ``OrderedDict``, both as
  policies in the same replayer, in the worst of the traces.

``--markdown FILE`` writes the tables of ``docs/policies.md``. Capacities are shares of a trace's different blocks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.report import machine
from tierkv import registry
from tierkv.config_table import BY_KEY
from tierkv.ids import FamilyId
from tierkv.policies.by_priority import with_priorities
from tierkv.policies.lru import LruPolicy
from tierkv.policies.on_hit import OnHitPolicy
from tierkv.policy import AdmissionPolicy, BlockInfo, EvictionPolicy
from tierkv.replay.formats import read_trace
from tierkv.replay.one_tier import BareTier, Outcome, replay, through
from tierkv.replay.optimum import replay_optimum
from tierkv.replay.tiers import Cold, Counts, Tiers, WriteRule, replay_tiers
from tierkv.replay.traces import Trace

TRACES = Path(__file__).parent / "traces"
NAMES = ("conv_a", "synth_a", "agentic_a")
PERCENT = (0.5, 1.0, 2.0, 5.0, 10.0, 25.0)
GAP_PERCENT = (1.0, 2.0, 5.0)
NVME_PERCENT = (1.0, 2.0, 5.0, 10.0, 20.0)
SMALL_NVME = 5.0
HOST_PERCENT = 1.0
BARE = ("arc", "lfu", "sieve")
NVME_WAYS = {
    "through": "`lru`, all written through",
    "on_evict": "`lru`, `always`",
    "seen_twice": "`lru`, `seen_twice`",
    "gate": "`lru`, `density`",
    "density": "`density`, `always`",
    "density_gate": "`density`, `density`",
}
"""How the table calls them: ``nvme.eviction``, ``nvme.admission``."""
OPTIMUM = "optimum"
SPEED_ROUNDS = 3

Row = dict[str, Any]


class OrderedDictLru:
    """The plainest LRU that speaks the protocol: what the time of a policy is compared with."""

    name = "ordered_dict_lru"

    def __init__(self) -> None:
        self._order: OrderedDict[FamilyId, None] = OrderedDict()

    def on_insert(self, infos: Sequence[BlockInfo]) -> None:
        for info in reversed(infos):
            self._order[info.id] = None

    def on_hit(self, ids: Sequence[FamilyId]) -> None:
        for ident in reversed(ids):
            self._order.move_to_end(ident)

    def on_remove(self, ids: Sequence[FamilyId], *, evicted: bool) -> None:
        for ident in ids:
            del self._order[ident]

    def victims(self, need: int, evictable: Callable[[FamilyId], bool]) -> Iterator[FamilyId]:
        for _, ident in zip(range(4 * need + 64), self._order, strict=False):
            if evictable(ident):
                yield ident

    def counters(self) -> Mapping[str, int]:
        return {}


def default_of(key: str) -> str:
    """What the configuration chooses when nobody says anything."""
    return str(BY_KEY[key].default)


def places_of(trace: Trace, percent: float) -> int:
    return max(1, int(trace.blocks * percent / 100))


def one_tier(trace: Trace, percent: float, policy: str, *, bare: bool = False) -> Outcome:
    places = places_of(trace, percent)
    if policy == OPTIMUM:
        return replay_optimum(trace, places)
    made = registry.load("eviction", policy, "--policies")()
    return through(BareTier(trace, places, made.inner), trace) if bare else replay(trace, places, made)


def two_tiers(trace: Trace, percent: float, eviction: str, admission: str, write: WriteRule) -> Counts:
    def evict() -> EvictionPolicy:
        return with_priorities(registry.load("eviction", eviction, "--policies"))

    def admit() -> AdmissionPolicy:
        made: AdmissionPolicy = registry.load("admission", admission, "--policies")()
        return made

    cold = Cold("nvme", places_of(trace, percent), evict, admit, write)
    host = places_of(trace, HOST_PERCENT)
    return replay_tiers(Tiers(trace, host, evict(), OnHitPolicy(), [cold], block_bytes=1 << 20), trace)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.policies", description="Policies on recorded traffic."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the tables of docs/policies.md here"
    )
    parser.add_argument(
        "--traces", type=Path, default=TRACES, metavar="FOLDER", help="with conv_a.jsonl.gz and so on"
    )
    parser.add_argument(
        "--policies", default=",".join(registry.names("eviction")), metavar="A,B", help="which"
    )
    parser.add_argument("--quick", action="store_true", help="a piece of each trace: shows that it runs")
    options = parser.parse_args(arguments)
    policies = list(dict.fromkeys(["lru", default_of("host.eviction"), *options.policies.split(",")]))
    traces = [read_trace(options.traces / f"{name}.jsonl.gz") for name in NAMES]
    if options.quick:
        traces = [Trace(trace.name, trace.block_tokens, trace.requests[:400]) for trace in traces]
    rows: dict[str, Row] = {}
    for name, measure in _cells(traces, policies):
        _say(name)
        rows[name] = measure()
    rows |= judged(rows)
    rows |= _speeds(traces)
    print(f"{machine()}\n")
    for name, row in rows.items():
        if "trace" not in row:
            print(f"{name}: {row['value']:,.2f}  {row['definition']}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=2, allow_nan=False) + "\n")
    if options.markdown is not None:
        options.markdown.write_text(markdown(rows, policies))
    return 0


def _cells(traces: Sequence[Trace], policies: Sequence[str]) -> Iterator[tuple[str, Callable[[], Row]]]:
    """The name of each cell and how it is measured."""
    for trace in traces:
        for percent in PERCENT:
            for policy in (OPTIMUM, *policies):
                yield cell(trace.name, percent, policy), partial(_row, trace, percent, policy, bare=False)
            for policy in BARE:
                name = cell(trace.name, percent, f"{policy}_bare")
                yield name, partial(_row, trace, percent, policy, bare=True)
    conv = traces[0]
    sides: tuple[tuple[str, str, str, WriteRule], ...] = (
        ("through", "lru", "always", "through"),
        ("on_evict", "lru", "always", "on_evict"),
        ("seen_twice", "lru", "seen_twice", "on_evict"),
        ("gate", "lru", "density", "on_evict"),
        ("density", "density", "always", "on_evict"),
        ("density_gate", "density", "density", "on_evict"),
    )
    for percent in NVME_PERCENT:
        for label, eviction, admission, write in sides:
            name = f"{NAMES[0]}/nvme_{percent:g}/{label}"
            yield name, partial(_nvme_row, conv, percent, eviction, admission, write)


def cell(trace: str, percent: float, policy: str) -> str:
    return f"{trace}/{percent:g}/{policy}"


def _row(trace: Trace, percent: float, policy: str, *, bare: bool) -> Row:
    outcome = one_tier(trace, percent, policy, bare=bare)
    return {
        "value": outcome.hit_percent,
        "second_half": outcome.late_hit_percent,
        "hit_blocks": outcome.hit_blocks,
        "evicted_blocks": outcome.evicted_blocks,
        "trace": trace.name,
        "percent": percent,
        "blocks": places_of(trace, percent),
        "policy": f"{policy}_bare" if bare else policy,
    }


def _nvme_row(trace: Trace, percent: float, eviction: str, admission: str, write: WriteRule) -> Row:
    counts = two_tiers(trace, percent, eviction, admission, write)
    return {
        "value": counts.hit_percent,
        "second_half": counts.late_hit_percent,
        "written_blocks": counts.written["nvme"],
        "trace": trace.name,
        "percent": percent,
    }


# -- what the default is judged by --------------------------------------------------------------------------------


def judged(rows: Mapping[str, Row]) -> dict[str, Row]:
    """From the cells, the rows that have a bar."""
    policy = default_of("host.eviction")
    losses = {
        half: {
            cell(name, percent, policy): rows[cell(name, percent, policy)][half]
            - rows[cell(name, percent, "lru")][half]
            for name in NAMES
            for percent in PERCENT
        }
        for half in ("value", "second_half")
    }
    worst = min(losses["value"], key=lambda name: losses["value"][name])
    gaps = {half: _mean_gap(rows, policy, half) for half in ("value", "second_half")}
    saved = [_saved(rows, percent) for percent in NVME_PERCENT if percent <= SMALL_NVME]
    return {
        "worst_below_leaf_lru_points": {
            "value": losses["value"][worst],
            "second_half": min(losses["second_half"].values()),
            "cell": worst,
            "definition": "points of the default against leaf-first LRU in its worst cell",
        },
        "gap_closed_conv_a_1_to_5": {
            "value": gaps["second_half"],
            "whole": gaps["value"],
            "definition": "percent of the gap between LRU and the optimum, second half of the trace",
        },
        "nvme_writes_saved_conv_a_small": {
            "value": min(fewer for fewer, _ in saved),
            "points": min(points for _, points in saved),
            "definition": "times fewer writes with the gate than by write-through with LRU, NVMe of 1 to 5 %",
        },
    }


def _mean_gap(rows: Mapping[str, Row], policy: str, half: str) -> float:
    closed = []
    for percent in GAP_PERCENT:
        lru, ours, best = (rows[cell("conv_a", percent, p)][half] for p in ("lru", policy, OPTIMUM))
        closed.append(100 * (ours - lru) / (best - lru) if best > lru else 0.0)
    return sum(closed) / len(closed)


def _saved(rows: Mapping[str, Row], percent: float) -> tuple[float, float]:
    through_lru, ours = (rows[f"conv_a/nvme_{percent:g}/{label}"] for label in ("through", "density_gate"))
    fewer = through_lru["written_blocks"] / max(1, ours["written_blocks"])
    return fewer, ours["value"] - through_lru["value"]


def _speeds(traces: Sequence[Trace]) -> dict[str, Row]:
    default = registry.load("eviction", default_of("host.eviction"), "host.eviction")
    rates, ratios = {}, {}
    for trace in traces:
        _say(f"speed on {trace.name}")
        plain, lru, ours = (
            min(_seconds(trace, make) for _ in range(SPEED_ROUNDS))
            for make in (OrderedDictLru, LruPolicy, default)
        )
        rates[trace.name] = trace.references / lru
        ratios[trace.name] = ours / plain
    return {
        "replay_refs_per_s": {
            "value": min(rates.values()),
            "by_trace": rates,
            "definition": "block references a second of processor time with LRU at 5 %, slowest trace",
        },
        "time_beside_ordered_dict_lru": {
            "value": max(ratios.values()),
            "by_trace": ratios,
            "definition": "processor time of a replay with the default / with an OrderedDict LRU, worst trace",
        },
    }


def _seconds(trace: Trace, make: Callable[[], EvictionPolicy]) -> float:
    places = places_of(trace, 5)
    policy = make()
    start = time.process_time()
    replay(trace, places, policy)
    return time.process_time() - start


# -- for people ---------------------------------------------------------------------------------------------------


def markdown(rows: Mapping[str, Row], policies: Sequence[str]) -> str:
    """The tables of ``docs/policies.md``."""
    lines = []
    for name in NAMES:
        shown = [OPTIMUM, *policies, *(f"{policy}_bare" for policy in BARE)]
        lines += ["", f"**{name}**, block hit rate in percent", ""]
        lines += [
            "| policy | " + " | ".join(f"{percent:g} %" for percent in PERCENT) + " |",
            "|---|" + "---:|" * 6,
        ]
        for policy in shown:
            figures = " | ".join(f"{rows[cell(name, percent, policy)]['value']:.2f}" for percent in PERCENT)
            lines.append(f"| `{policy}` | {figures} |")
    lines += ["", "**conv_a**, NVMe behind host RAM of 1 %: hit rate, and blocks written in thousands", ""]
    lines += ["| | " + " | ".join(f"{percent:g} %" for percent in NVME_PERCENT) + " |", "|---|" + "---:|" * 5]
    for label, what in NVME_WAYS.items():
        cells = [rows[f"conv_a/nvme_{percent:g}/{label}"] for percent in NVME_PERCENT]
        figures = " | ".join(f"{row['value']:.2f}, {row['written_blocks'] / 1000:.0f}k" for row in cells)
        lines.append(f"| {what} | {figures} |")
    return "\n".join(lines).lstrip("\n") + "\n"


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
