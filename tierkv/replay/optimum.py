"""What the best eviction could have hit: Belady's rule ("A study of replacement algorithms", 1966) with bypass.

The block whose next use lies furthest ahead leaves, of equal ones the deeper, and a new block that would be the
furthest is not taken in. A block's parent is used whenever it is, so this never leaves a block without its parents.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from tierkv.replay.one_tier import Outcome
from tierkv.replay.traces import Trace

_TELL_EVERY = 256


def replay_optimum(
    trace: Trace, capacity: int, progress: Callable[[float], None] = lambda share: None
) -> Outcome:
    """As ``one_tier.replay``, knowing the future."""
    requests = trace.requests
    count = len(requests)
    never = count
    following = [never] * trace.blocks
    ahead: list[list[int]] = [[] for _ in requests]
    """By request and place: the request that uses the block next."""
    for number in range(count - 1, -1, -1):
        ids = requests[number].ids
        ahead[number] = [following[ident] for ident in ids]
        for ident in ids:
            following[ident] = number
    outcome, half = Outcome(), count // 2
    due = [-1] * trace.blocks
    """By block that is here: its next use."""
    order: list[tuple[int, int, int]] = []
    """A heap of (minus next use, minus depth, block), and entries that are true no more."""
    here = 0
    for number, request in enumerate(requests):
        if number % _TELL_EVERY == 0:
            progress(number / count)
        ids = request.ids
        hits = 0
        while hits < len(ids) and due[ids[hits]] >= 0:
            hits += 1
        outcome.references += len(ids)
        outcome.hit_blocks += hits
        if number >= half:
            outcome.late_references += len(ids)
            outcome.late_hit_blocks += hits
        for depth, (ident, use) in enumerate(zip(ids, ahead[number], strict=True)):
            if due[ident] >= 0:
                here -= 1
            due[ident] = -1
            if use != never:
                due[ident] = use
                here += 1
                heappush(order, (-use, -depth, ident))
        while here > capacity:
            use, _, ident = heappop(order)
            if due[ident] == -use:
                due[ident] = -1
                here -= 1
                outcome.evicted_blocks += 1
    return outcome
