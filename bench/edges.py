"""`python -m bench.edges --json FILE`: each edge of the store beside its physical limit, in the same run.

    --only NAME    rows or experiments whose name contains NAME (may be repeated)
    --rounds N     rounds of ours, limit, limit, ours for each (default 12; fewer are for a look only)
    --quick        3 rounds, small sizes, no repetition: shows that it runs
    --dir PATH     where the disk rows put their files (default .bench), on the disk that is to be measured

The codecs' rows need the demo's model (`make demo`) and are said to be missing without it. What the rows mean stands in
the JSON ("definition") and in docs; the ratio is always value / limit.
"""

from __future__ import annotations

import sys

from bench.command import Bench
from bench.edge_codec import CodecEdge
from bench.edge_host import HostLoad, HostPut
from bench.edge_import import ImportTierkv
from bench.edge_keys import KeysChain
from bench.edge_nvme import NVME_CPU, NvmeEdge
from bench.edge_valkey import VALKEY_GET_CPU, VALKEY_SET_CPU, ValkeyEdge
from bench.ending import unwind_at_sigterm
from bench.harness import Experiment, Reach

EXPERIMENTS: tuple[Experiment, ...] = (
    HostPut(),
    HostLoad(1, Reach("value", "<=", 8)),
    HostLoad(64, Reach("value", "<=", 1)),
    NvmeEdge("read"),
    NvmeEdge("write"),
    ValkeyEdge("get", "tcp"),
    ValkeyEdge("get", "unix"),
    ValkeyEdge("set", "tcp"),
    ValkeyEdge("set", "unix"),
    KeysChain(),
    ImportTierkv(),
    *(CodecEdge(name) for name in ("int8", "fp8_e4m3", "planes_zstd", "lz4", "zstd", "blosc2")),
)
SUMS = (NVME_CPU, VALKEY_GET_CPU, VALKEY_SET_CPU)


BENCH = Bench("python -m bench.edges", (__doc__ or "").partition("\n")[0], EXPERIMENTS, SUMS)

if __name__ == "__main__":
    unwind_at_sigterm()
    sys.exit(BENCH.main())
