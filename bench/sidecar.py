"""`python -m bench.sidecar --json FILE`: the daemon beside its limits, in the same run.

    --only NAME    rows or experiments whose name contains NAME (may be repeated)
    --rounds N     rounds of ours, limit, limit, ours for each (default 12; fewer are for a look only)
    --quick        3 rounds, no repetition: shows that it runs

What the rows mean stands in the JSON ("definition").
"""

from __future__ import annotations

import sys

from bench.command import Bench
from bench.ending import unwind_at_sigterm
from bench.harness import Experiment
from bench.side_bytes import LoadBytes, PutBytes, SingleBytes
from bench.side_calls import Match1, Match1900, RoundTrip
from bench.side_life import Idle, Ready
from bench.side_sessions import Sessions

EXPERIMENTS: tuple[Experiment, ...] = (
    RoundTrip(),
    Match1(),
    Match1900(),
    PutBytes(),
    LoadBytes(),
    SingleBytes(),
    Sessions(4),
    Sessions(16),
    Sessions(16, new=True),
    Idle(),
    Ready(),
)

BENCH = Bench("python -m bench.sidecar", (__doc__ or "").partition("\n")[0], EXPERIMENTS)

if __name__ == "__main__":
    unwind_at_sigterm()
    sys.exit(BENCH.main())
