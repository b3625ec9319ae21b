"""Reference implementation of ``DensityPolicy``: one record a block, and every leaf looked at for every victim.

It shares with the policy the numbers in its rules alone. Zones, ghosts, caution, the table and the worths are written
here once more, in the plainest way; what is under observation is counted anew from the records at every lesson.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from naive_reuse import BINS, bin_of, hazards_of, worth_of

from tierkv.ids import FamilyId
from tierkv.policies import caution, density, ghosts, lessons, reuse, zones
from tierkv.policy import BlockInfo


@dataclass
class Block:
    parent: int | None
    """``None`` also when it has left."""
    hits: int
    gap: int
    """Blocks behind it in the request that used it last; 8 stands for more."""
    last: int
    stretch: int
    mark: bytes = b""
    """By this it will be remembered."""

    @property
    def kind(self) -> int:
        zone = 0 if self.gap < zones.NEAR_BLOCKS else 1 if self.gap < zones.MIDDLE_BLOCKS else 2
        return self.hits * zones.ZONES + zone


@dataclass
class Gone:
    """A ghost."""

    hits: int
    kind: int
    last: int
    stretch: int
    weight: int


class NaiveDensity:
    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.ghosts: dict[bytes, Gone] = {}
        self.now = 0
        self.next_lesson, self.next_stretch = lessons.LESSON_BLOCKS, 0
        self.begins = [0]
        """When each stretch began."""
        self.uses, self.ends, self.starts = (defaultdict[tuple[int, int], float](float) for _ in range(3))
        self.clearly = 0.0
        self.asked = self.ours = self.lru = 0.0
        self.last_look = 0
        self.edge = (0.0, 0.0, 0.0)
        self.oldest = 0
        self.worth = self.worths()
        self.counts = Counter[str](lessons=1)

    # ---- what happens

    def on_hit(self, ids: Sequence[int]) -> None:
        if not ids:
            return
        self.pass_time(len(ids))
        here = list(dict.fromkeys(ident for ident in ids if ident in self.blocks))
        for ident in here:
            block = self.blocks[ident]
            age = self.now - block.last
            self.uses[block.kind, bin_of(age)] += 1
            self.ours += 1
            self.lru += self.in_lru(block.last, here=True)
            block.hits = min(block.hits + 1, density.MOST_HITS)
            block.gap, block.last, block.stretch = zones.MIDDLE_BLOCKS, self.now, len(self.begins) - 1
        self.counts["hit"] += len(here)
        gap, behind = 0 if here and self.is_leaf(here[-1]) else zones.MIDDLE_BLOCKS, None
        for ident in reversed(here):
            if behind is not None and self.blocks[behind].parent != ident:
                break
            self.blocks[ident].gap = gap
            gap, behind = gap + 1, ident

    def on_insert(self, infos: Sequence[BlockInfo]) -> None:
        run: list[BlockInfo] = []
        for info in infos:
            if run and (info.parent != run[-1].id or info.id in [one.id for one in run]):
                self.insert(run)
                run = []
            run.append(info)
        if run:
            self.insert(run)

    def on_remove(self, ids: Sequence[int], *, evicted: bool) -> None:
        for ident in ids:
            block = self.blocks.pop(ident, None)
            if block is None:
                continue
            for other in self.blocks.values():
                other.parent = None if other.parent == ident else other.parent
            self.counts["removed"] += 1
            self.counts["evicted"] += evicted
            if evicted and block.mark:
                self.remember(block)
            self.ends[block.kind, bin_of(self.now - block.last)] += 1

    def order(self, need: int, asked: list[tuple[FamilyId, bool]]) -> list[int]:
        """Whom it asks about, one more than were asked by the policy. Of leaves that are due alike it takes the one
        that the policy took."""
        if self.now >= self.next_lesson:
            self.learn()
        children = Counter(block.parent for block in self.blocks.values())
        leaves = [ident for ident in self.blocks if not children[ident]]
        self.oldest_is(min([self.blocks[ident].last for ident in leaves], default=0))
        found: list[int] = []
        refused: list[int] = []
        while leaves and len(found) < min(len(asked) + 1, 4 * need + 64):
            wanted, may_leave = asked[len(found)] if len(found) < len(asked) else (None, False)
            due = self.due(leaves)
            self.counts["alike"] += len(due) > 1
            found.append(wanted if wanted in due else due[0])
            if found[-1] != wanted:
                return found
            leaves.remove(wanted)
            if may_leave:
                parent = self.blocks[wanted].parent
                children[parent] -= 1
                if parent is not None and not children[parent]:
                    leaves.append(parent)
            else:
                refused.append(wanted)
        for ident in refused:
            above = self.blocks[ident].parent
            while above is not None:
                found += [above] if above not in found else []
                above = self.blocks[above].parent
        return found[: min(len(asked) + 1, 4 * need + 64)]

    def due(self, leaves: list[int]) -> list[int]:
        """The least valuable, if that is clearly less valuable than the least recently used; otherwise this one. More
        than one only where both worth and last use are the same."""
        lasts = {ident: self.blocks[ident].last for ident in leaves}
        worth = {
            ident: self.worth[self.blocks[ident].kind][bin_of(self.now - lasts[ident])] for ident in leaves
        }
        least = min((worth[ident], lasts[ident]) for ident in leaves)
        oldest = min(lasts.values())
        found: list[int] = []
        for ident in leaves:
            if lasts[ident] == oldest:
                if least[0] > self.clearly * worth[ident]:
                    found.append(ident)
                else:
                    found += [one for one in leaves if (worth[one], lasts[one]) == least]
        return found

    # ---- arrivals

    def insert(self, infos: list[BlockInfo]) -> None:
        ids, names, parent = [info.id for info in infos], [info.block_hash for info in infos], infos[0].parent
        self.on_remove(ids, evicted=False)
        self.pass_time(len(ids))
        self.counts["inserted"] += len(ids)
        before: list[int] = []
        up = parent if parent in self.blocks else None
        if up is not None and self.is_leaf(up):
            before, up = self.taken_from(up)
            if up is not None and self.blocks[up].gap < zones.MIDDLE_BLOCKS:
                self.rezone(up, len(before) + len(ids))
        if parent in self.blocks and not self.blocks[parent].hits:
            mark = self.blocks[parent].mark
            self.blocks[parent].mark = mark if mark and mark[0] < ghosts.SAMPLED_BELOW else b""
        self.place(before, ids, up, self.recall(names))
        for ident, name in zip(ids, names, strict=True):
            if name and (name[0] < ghosts.SAMPLED_BELOW or ident == ids[-1]):
                self.blocks[ident].mark = name

    def taken_from(self, leaf: int) -> tuple[list[int], int | None]:
        """The request of that leaf goes on: its blocks that are near its end and were never used again."""
        before: list[int] = []
        last = self.blocks[leaf].last
        up: int | None = leaf
        while up is not None:
            block = self.blocks[up]
            if block.hits or block.last != last or block.gap >= zones.MIDDLE_BLOCKS:
                break
            before.insert(0, up)
            up = block.parent
        return before, up

    def place(self, before: list[int], ids: list[int], up: int | None, hits: list[int]) -> None:
        whole, shift = before + ids, len(before)
        for at, ident in enumerate(whole):
            mark = self.blocks[ident].mark if at < shift else b""
            gap, past = len(whole) - 1 - at, max(hits[max(0, at - shift) :])
            parent = whole[at - 1] if at else up
            self.blocks[ident] = Block(parent, past, gap, self.now, len(self.begins) - 1, mark)
        above = self.blocks[up] if up is not None else None
        if before and above is not None and self.now - above.last <= lessons.LESSON_BLOCKS:
            last = above.last
            while above is not None and (above.last, above.kind) == (last, self.blocks[whole[0]].kind):
                above.last, above.stretch = self.now, len(self.begins) - 1
                above = self.blocks[above.parent] if above.parent is not None else None

    def rezone(self, ident: int, gap: int) -> None:
        block: Block | None = self.blocks[ident]
        last = self.blocks[ident].last
        while block is not None and block.last == last and min(block.gap, gap) < zones.MIDDLE_BLOCKS:
            block.gap, gap = gap, gap + 1
            block = self.blocks[block.parent] if block.parent is not None else None

    def is_leaf(self, ident: int) -> bool:
        return not any(block.parent == ident for block in self.blocks.values())

    # ---- ghosts

    def remember(self, block: Block) -> None:
        self.forget(block.mark)
        weight = ghosts.STANDS_FOR if block.mark[0] < ghosts.SAMPLED_BELOW else 0
        self.ghosts[block.mark] = Gone(block.hits, block.kind, block.last, block.stretch, weight)
        self.starts[block.kind, bin_of(self.now - block.last)] += weight
        while len(self.ghosts) > ghosts.GHOSTS_PER_RESIDENT * len(self.blocks):
            self.forget(next(iter(self.ghosts)))

    def forget(self, name: bytes) -> None:
        ghost = self.ghosts.pop(name, None)
        if ghost is not None:
            self.ends[ghost.kind, bin_of(self.now - ghost.last)] += ghost.weight

    def recall(self, names: list[bytes]) -> list[int]:
        """Of each new block how often it was used before it left, as far as its own ghost tells."""
        found = []
        for name in names:
            ghost = self.ghosts.pop(name, None)
            found.append(0 if ghost is None else min(ghost.hits + 1, density.MOST_HITS))
            if ghost is not None:
                age = self.now - ghost.last
                self.uses[ghost.kind, bin_of(age)] += ghost.weight
                self.lru += ghost.weight * self.in_lru(ghost.last, here=False)
                self.counts["recognised"] += 1
        return found

    # ---- lessons

    def pass_time(self, blocks: int) -> None:
        self.now += blocks
        lesson = max(lessons.LESSON_BLOCKS, len(self.blocks) // 4)
        if self.now >= self.next_stretch:
            self.begins.append(self.now)
            self.next_stretch = self.now + min(lesson, max(512, len(self.blocks))) // lessons.STRETCHES
            if self.now >= self.last_look + lesson // lessons.LOOKS:
                self.look()
            self.edge = self.edge_of_lru()
            self.oldest_is(self.oldest)
            if self.now >= self.next_lesson + lessons.MOST_LATE * lesson:
                self.learn()

    def learn(self) -> None:
        self.worth = self.worths()
        self.counts["lessons"] += 1
        for counted in (self.uses, self.ends, self.starts):
            for cell in counted:
                counted[cell] *= reuse.KEPT
        self.next_lesson = self.now + max(lessons.LESSON_BLOCKS, len(self.blocks) // 4)

    def look(self) -> None:
        if self.edge[0]:
            self.asked += self.now - self.last_look
            worse = self.ours - self.lru < -caution.TOLERATED * self.asked
            step = -caution.STEP_DOWN if worse else caution.STEP_UP
            self.clearly = min(caution.FULL, max(0.0, self.clearly + step))
            self.asked, self.ours, self.lru = (
                caution.KEPT * counted for counted in (self.asked, self.ours, self.lru)
            )
        else:
            self.ours = self.lru = 0.0
        self.last_look = self.now

    def edge_of_lru(self) -> tuple[float, float, float]:
        """The stretch of time in which the block was used last that LRU would evict, and the share that it holds."""
        watched = Counter[int]()
        for one in (*self.blocks.values(), *self.ghosts.values()):
            watched[one.stretch] += 1 if isinstance(one, Block) else one.weight
        left = len(self.blocks)
        for seen, stretch in enumerate(sorted(+watched, reverse=True), 1):
            if watched[stretch] >= left > 0 or seen == reuse.MOST_BACK:
                ends = [*self.begins[stretch + 1 :], float("inf")][0]
                return self.begins[stretch], ends - 0.5, min(1.0, left / watched[stretch])
            left -= watched[stretch]
        return 0.0, 0.0, 0.0

    def oldest_is(self, last: int) -> None:
        self.oldest = last
        if self.edge[0] and last >= self.edge[0]:
            self.edge = last, last, 1.0

    def in_lru(self, last: int, *, here: bool) -> float:
        """How much of a block that was used last then. At an edge that is known exactly all that is here is there."""
        since, sure, share = self.edge
        if last > sure or (here and last == sure):
            return 1.0
        return share if since <= last < sure else 0.0

    def worths(self) -> list[list[float]]:
        uses = [[self.uses[kind, bin_] for bin_ in range(BINS)] for kind in range(density.KINDS)]
        beyond = [[self.ends[k, b] - self.starts[k, b] for b in range(BINS)] for k in range(density.KINDS)]
        for one in (*self.blocks.values(), *self.ghosts.values()):
            weight = 1 if isinstance(one, Block) else one.weight
            beyond[one.kind][bin_of(self.now - self.begins[one.stretch])] += weight
        seen = [
            [max(sum(uses[k][b:]) + sum(beyond[k][b + 1 :]), uses[k][b]) for b in range(BINS)]
            for k in range(density.KINDS)
        ]
        known = max((b + 1 for b in range(BINS) if any(row[b] for row in seen)), default=0)
        return [worth_of(hazards, min(known + 2, BINS)) for hazards in hazards_of(uses, seen)]
