"""`python -m bench.metadata --json FILE`: what the store costs beside the bytes, each beside its limit in the same run.

    --only NAME    rows or experiments whose name contains NAME (may be repeated)
    --rounds N     rounds of ours, limit, limit, ours for each (default 12; fewer are for a look only)
    --quick        3 rounds, small sizes, no repetition: shows that it runs
    --dir PATH     where the NVMe tier puts its files (default .bench)

What the rows mean stands in the JSON ("definition").
"""

from __future__ import annotations

import sys

from bench.command import Bench
from bench.ending import unwind_at_sigterm
from bench.harness import Experiment, Worst
from bench.meta_growth import Growth
from bench.meta_load import MatchUnderLoad
from bench.meta_match import MatchLong
from bench.meta_small import SmallOps, SmallOpsThreads

EXPERIMENTS: tuple[Experiment, ...] = (
    SmallOps("small_ops", batch=16, per_second=50_000),
    SmallOps("small_ops_single", batch=1, per_second=20_000),
    SmallOpsThreads(),
    MatchLong("match_8192_of_1e5", resident=0.1),
    MatchLong("match_8192_of_1e6", resident=1.0),
    Growth(),
    MatchUnderLoad(),
)
SUMS = (Worst("match_8192", ("match_8192_of_1e5", "match_8192_of_1e6")),)

BENCH = Bench("python -m bench.metadata", (__doc__ or "").partition("\n")[0], EXPERIMENTS, SUMS)

if __name__ == "__main__":
    unwind_at_sigterm()
    sys.exit(BENCH.main())
