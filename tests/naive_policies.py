"""Reference implementations: what a prefix cache with a policy hits, written in the plainest way, over whole traces.

They know nothing of the policies' code, of its protocol or of the replayer.
"""

from collections import OrderedDict

from tierkv.replay.traces import Trace


def naive_lru(trace: Trace, capacity: int) -> int:
    """Least recently used, the tail of a prompt before its head: blocks hit."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        for ident in request.ids:
            if ident not in cache:
                break
            hits += 1
        for ident in reversed(request.ids):
            cache[ident] = None
            cache.move_to_end(ident)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


def naive_optimum(trace: Trace, capacity: int) -> int:
    """Belady with bypass, the deeper one of two first."""
    uses: dict[int, list[int]] = {}
    for number, request in enumerate(trace.requests):
        for ident in request.ids:
            uses.setdefault(ident, []).append(number)
    depth = {ident: place for request in trace.requests for place, ident in enumerate(request.ids)}
    cache: dict[int, int] = {}
    hits = 0
    for number, request in enumerate(trace.requests):
        for ident in request.ids:
            if ident not in cache:
                break
            hits += 1
        for ident in request.ids:
            later = [use for use in uses[ident] if use > number]
            cache.pop(ident, None)
            if later:
                cache[ident] = later[0]
        leaving = sorted(cache, key=lambda ident: (cache[ident], depth[ident]))[capacity:]
        for ident in leaving:
            del cache[ident]
    return hits
