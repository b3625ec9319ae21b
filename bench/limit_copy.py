"""The limit of a store's front door: copy a block into place and checksum it, nothing else."""

from __future__ import annotations

import time

import numpy as np
import xxhash

from bench.harness import Sample
from bench.memory import Blocks
from tierkv.units import MIB


def copy_and_checksum(targets: Blocks, sources: Blocks) -> Sample:
    """Copies each source into its target and checksums the copy; MiB/s of wall time."""
    copyto, checksum = np.copyto, xxhash.xxh3_64_intdigest
    start_s = time.perf_counter()
    for target, source, copy in zip(targets.arrays, sources.arrays, targets.views, strict=True):
        copyto(target, source)
        checksum(copy)
    elapsed_s = time.perf_counter() - start_s
    return {"mib_per_s": len(sources) * sources.block_bytes / MIB / elapsed_s}


def checksum_cpu_us_per_mib(blocks: Blocks) -> float:
    """CPU that one xxh3_64 costs for a MiB, over blocks that no cache of a core holds all of."""
    checksum = xxhash.xxh3_64_intdigest
    start_s = time.thread_time()
    for view in blocks.views:
        checksum(view)
    elapsed_s = time.thread_time() - start_s
    return elapsed_s * 1e6 / (len(blocks) * blocks.block_bytes / MIB)
