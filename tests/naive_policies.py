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


# ---- the classic policies: an order from a plain list, and what happens on a use and a departure


class Naive:
    """``steps`` says what happens when one after the other is evicted: ("out", block), or ("on", block) for one that
    only moves. ``commit`` is told how far that was followed and who has really left."""

    def __init__(self, names: list[bytes]) -> None:
        self.names = names
        self.most = 0

    def enter(self, block: int) -> None:
        raise NotImplementedError

    def use(self, block: int) -> None:
        raise NotImplementedError

    def steps(self) -> list[tuple[str, int]]:
        raise NotImplementedError

    def leave(self, block: int) -> None:
        raise NotImplementedError

    def commit(self, followed: list[tuple[str, int]], gone: list[int]) -> None:
        for block in gone:
            self.leave(block)

    def settle(self, resident: int) -> None:
        self.most = max(self.most, resident)


class NaiveSlru(Naive):
    def __init__(self, names: list[bytes]) -> None:
        super().__init__(names)
        self.probation: list[int] = []
        self.protected: list[int] = []

    def enter(self, block: int) -> None:
        self.probation.append(block)

    def use(self, block: int) -> None:
        self.leave(block)
        self.protected.append(block)
        if len(self.protected) > 0.8 * (len(self.protected) + len(self.probation)):
            self.probation.append(self.protected.pop(0))

    def steps(self) -> list[tuple[str, int]]:
        return [("out", block) for block in self.probation + self.protected]

    def leave(self, block: int) -> None:
        (self.probation if block in self.probation else self.protected).remove(block)


class NaiveLfu(Naive):
    def __init__(self, names: list[bytes]) -> None:
        super().__init__(names)
        self.uses: dict[int, int] = {}
        self.rank: dict[int, float] = {}
        self.age = 0.0

    def worth(self, block: int) -> float:
        return 1.0

    def enter(self, block: int) -> None:
        self.uses[block] = 0
        self.use(block)

    def use(self, block: int) -> None:
        self.uses[block] += 1
        self.rank.pop(block, None)  # the dict's order is that of the last use
        self.rank[block] = self.age + self.uses[block] * self.worth(block)

    def steps(self) -> list[tuple[str, int]]:
        return [("out", block) for block in sorted(self.rank, key=lambda block: self.rank[block])]

    def leave(self, block: int) -> None:
        self.age = max(self.age, self.rank.pop(block))
        del self.uses[block]


class NaiveArc(Naive):
    def __init__(self, names: list[bytes]) -> None:
        super().__init__(names)
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []
        self.p = 0.0

    def enter(self, block: int) -> None:
        name = self.names[block]
        if name in self.b1:
            self.p = min(self.p + max(1.0, len(self.b2) / len(self.b1)), float(self.most))
            self.b1.remove(name)
            self.t2.append(block)
        elif name in self.b2:
            self.p = max(self.p - max(1.0, len(self.b1) / len(self.b2)), 0.0)
            self.b2.remove(name)
            self.t2.append(block)
        else:
            self.t1.append(block)

    def use(self, block: int) -> None:
        (self.t1 if block in self.t1 else self.t2).remove(block)
        self.t2.append(block)

    def steps(self) -> list[tuple[str, int]]:
        t1, t2, found = list(self.t1), list(self.t2), []
        while t1 or t2:
            found.append(("out", t1.pop(0) if t1 and (len(t1) > self.p or not t2) else t2.pop(0)))
        return found

    def leave(self, block: int) -> None:
        here, ghosts = (self.t1, self.b1) if block in self.t1 else (self.t2, self.b2)
        here.remove(block)
        ghosts.append(self.names[block])
        self.trim()

    def settle(self, resident: int) -> None:
        super().settle(resident)
        self.trim()

    def trim(self) -> None:
        del self.b1[: max(0, len(self.b1) - max(0, self.most - len(self.t1)))]
        del self.b2[: max(0, len(self.b2) - max(0, self.most - len(self.b1)))]


class NaiveSieve(Naive):
    def __init__(self, names: list[bytes]) -> None:
        super().__init__(names)
        self.line: list[int] = []
        self.marked: set[int] = set()
        self.hand: int | None = None

    def enter(self, block: int) -> None:
        self.line.append(block)

    def use(self, block: int) -> None:
        self.marked.add(block)

    def round(self) -> list[int]:
        start = 0 if self.hand is None else self.line.index(self.hand)
        return self.line[start:] + self.line[:start]

    def steps(self) -> list[tuple[str, int]]:
        circle = self.round()
        first = [block for block in circle if block not in self.marked]
        return [("out", block) for block in first + [block for block in circle if block in self.marked]]

    def commit(self, followed: list[tuple[str, int]], gone: list[int]) -> None:
        named = {block for _, block in followed}
        for block in gone:
            if block in named:
                circle = self.round()
                while circle[0] != block or block in self.marked:
                    self.marked.discard(circle[0])
                    circle = circle[1:] + circle[:1]
                self.hand = block
            place = self.line.index(block)
            self.line.remove(block)
            self.marked.discard(block)
            if self.hand == block:
                self.hand = self.line[place] if place < len(self.line) else None


class NaiveS3Fifo(Naive):
    def __init__(self, names: list[bytes]) -> None:
        super().__init__(names)
        self.small: list[int] = []
        self.main: list[int] = []
        self.hits: dict[int, int] = {}
        self.ghosts: list[bytes] = []

    def enter(self, block: int) -> None:
        self.hits[block] = 0
        if self.names[block] in self.ghosts:
            self.ghosts.remove(self.names[block])
            self.main.append(block)
        else:
            self.small.append(block)

    def use(self, block: int) -> None:
        self.hits[block] = min(3, self.hits[block] + 1)

    def steps(self) -> list[tuple[str, int]]:
        small, main, hits, found = list(self.small), list(self.main), dict(self.hits), []
        while small or main:
            if small and (len(small) > 0.1 * (len(small) + len(main)) or not main):
                block = small.pop(0)
                stays, hits[block] = hits[block] > 1, 0
            else:
                block = main.pop(0)
                stays, hits[block] = hits[block] > 0, hits[block] - 1
            if stays:
                main.append(block)
            found.append(("on" if stays else "out", block))
        return found

    def commit(self, followed: list[tuple[str, int]], gone: list[int]) -> None:
        left = list(followed)
        for block in gone:
            if ("out", block) in left:
                stop = left.index(("out", block))
                for kind, mover in left[:stop]:
                    if kind == "on" and mover in self.small:
                        self.small.remove(mover)
                        self.main.append(mover)
                        self.hits[mover] = 0
                    elif kind == "on" and mover in self.main:
                        self.main.remove(mover)
                        self.main.append(mover)
                        self.hits[mover] = max(0, self.hits[mover] - 1)
                del left[:stop]
            if block in self.small:
                self.small.remove(block)
                self.ghosts.append(self.names[block])
            else:
                self.main.remove(block)
            del self.hits[block]
            del self.ghosts[: max(0, len(self.ghosts) - len(self.main))]


class NaiveTinyLfu(Naive):
    """With exact counts: as long as the traffic is small beside the sketch, that is what it counts; and is halved when
    so many were seen."""

    def __init__(self, names: list[bytes]) -> None:
        super().__init__(names)
        self.count: dict[int, int] = {}
        self.seen = 0
        self.samples = 1280
        self.window: list[int] = []
        self.candidates: list[int] = []
        self.probation: list[int] = []
        self.protected: list[int] = []

    @property
    def size(self) -> int:
        return sum(map(len, (self.window, self.candidates, self.probation, self.protected)))

    def see(self, block: int) -> None:
        self.count[block] = min(15, self.count.get(block, 0) + 1)
        self.seen += 1
        if self.seen >= self.samples:
            self.seen //= 2
            self.count = {block: count // 2 for block, count in self.count.items()}

    def enter(self, block: int) -> None:
        self.see(block)
        self.window.append(block)

    def settle(self, resident: int) -> None:
        self.samples = 10 * max(resident, 128)
        while len(self.window) > max(1, int(0.01 * self.size)):
            self.candidates.append(self.window.pop(0))

    def use(self, block: int) -> None:
        self.see(block)
        if block in self.window:
            self.window.remove(block)
            self.window.append(block)
            return
        for part in (self.candidates, self.probation, self.protected):
            if block in part:
                part.remove(block)
        self.protected.append(block)
        if len(self.protected) > 0.8 * (self.size - len(self.window)):
            self.probation.append(self.protected.pop(0))

    def steps(self) -> list[tuple[str, int]]:
        main, candidates, won, found = self.probation + self.protected, list(self.candidates), [], []
        while candidates:
            if main and self.count[candidates[0]] > self.count[main[0]]:
                found.append(("on", candidates[0]))
                won.append(candidates.pop(0))
                found.append(("out", main.pop(0)))
            else:
                found.append(("out", candidates.pop(0)))
        return found + [("out", block) for block in [*main, *won, *self.window]]

    def commit(self, followed: list[tuple[str, int]], gone: list[int]) -> None:
        for block in gone:
            place = followed.index(("out", block)) if ("out", block) in followed else 0
            if place and followed[place - 1][0] == "on" and followed[place - 1][1] in self.candidates:
                self.candidates.remove(followed[place - 1][1])
                self.probation.append(followed[place - 1][1])
            for part in (self.window, self.candidates, self.probation, self.protected):
                if block in part:
                    part.remove(block)


# ---- the driver


def naive_hits(trace: Trace, capacity: int, policy: Naive, *, leaves_only: bool) -> int:
    """Blocks hit by a prefix cache with such a policy. ``leaves_only``: what hangs from a block leaves before it, the
    newest branch first, as the store and ``LeafFirst`` have it; otherwise the policy decides alone."""
    here: dict[int, int] = {}
    """Blocks that are there and their parents, in the order of their arrival."""
    hits = 0
    for request in trace.requests:
        present = [block for block in request.ids if block in here]
        missing = [block for block in request.ids if block not in here]
        hits += next((at for at, block in enumerate(request.ids) if block not in here), len(request.ids))
        for block in reversed(present):
            policy.use(block)
        while missing and len(missing) > capacity - len(here):
            need = len(missing) - (capacity - len(here))
            gone, followed = _gone(here, policy.steps(), need, set(present), leaves_only=leaves_only)
            policy.commit(followed, gone)
            for block in gone:
                del here[block]
            if not gone:
                break
        room = missing[: capacity - len(here)]
        for block in room:
            place = request.ids.index(block)
            here[block] = request.ids[place - 1] if place else -1
        for block in reversed(room):
            policy.enter(block)
        if room:
            policy.settle(len(here))
    return hits


def _gone(
    here: dict[int, int], steps: list[tuple[str, int]], need: int, keep: set[int], *, leaves_only: bool
) -> tuple[list[int], list[tuple[str, int]]]:
    gone: list[int] = []
    looked: list[int] = []
    for place, (kind, wanted) in enumerate(steps):
        if kind == "on":
            continue
        for block in _with_what_hangs(here, wanted, looked) if leaves_only else [wanted]:
            if len(looked) == 4 * need + 64:
                return gone, steps[: place + 1]
            looked.append(block)
            bare = not any(parent == block and child not in gone for child, parent in here.items())
            if block not in keep and (bare or not leaves_only):
                gone.append(block)
                if len(gone) == need:
                    return gone, steps[: place + 1]
    return gone, steps


def _with_what_hangs(here: dict[int, int], block: int, given: list[int]) -> list[int]:
    children = [child for child, parent in here.items() if parent == block]
    below = [one for child in reversed(children) for one in _with_what_hangs(here, child, given)]
    return [one for one in [*below, block] if one not in given]
