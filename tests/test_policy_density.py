"""DensityPolicy keeps the eviction contract, and asks about the same blocks in the same order as a plain implementation
of its rules: on made-up traffic with ids that are used again, holes and prompts in pieces, and on recorded traffic.

Where several leaves are due alike (same worth, same last use: blocks of one use, between which another has left) any of
them may be asked about first; the reference then follows the policy.
"""

import hashlib
import itertools
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
from naive_density import NaiveDensity
from replay_support import NAMES, capacity, made_up, piece

from tierkv.ids import FamilyId
from tierkv.policies import caution, leaves, lessons
from tierkv.policies.density import DensityPolicy
from tierkv.policies.segments import Segment, Segments
from tierkv.policy import BlockInfo, EvictionPolicy, InfoRun
from tierkv.replay.one_tier import BareTier, OneTier, through
from tierkv.testing.eviction import EvictionPolicyContract


class TestDensity(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return DensityPolicy()


# ---- side by side


class BothDensities:
    """The policy, with the reference beside it. What was asked is compared before anything changes."""

    name = "both"

    def __init__(self) -> None:
        self.real, self.naive = DensityPolicy(), NaiveDensity()
        self.compared = 0
        self._need = 0
        self._asked: list[tuple[FamilyId, bool]] | None = None
        self._exhausted = False

    def on_insert(self, infos: Sequence[BlockInfo]) -> None:
        self.compare()
        self.real.on_insert(infos)
        self.naive.on_insert(infos)

    def on_hit(self, ids: Sequence[FamilyId]) -> None:
        self.compare()
        self.real.on_hit(ids)
        self.naive.on_hit(ids)

    def on_remove(self, ids: Sequence[FamilyId], *, evicted: bool) -> None:
        self.compare()
        self.real.on_remove(ids, evicted=evicted)
        self.naive.on_remove(ids, evicted=evicted)

    def counters(self) -> Mapping[str, int]:
        return self.real.counters()

    def victims(self, need: int, evictable: Callable[[FamilyId], bool]) -> Iterator[FamilyId]:
        self.compare()
        asked: list[tuple[FamilyId, bool]] = []
        self._need, self._asked, self._exhausted = need, asked, False

        def ask(family: FamilyId) -> bool:
            asked.append((family, evictable(family)))
            return asked[-1][1]

        for victim in self.real.victims(need, ask):
            assert asked[-1] == (victim, True)
            yield victim
        self._exhausted = True

    def compare(self) -> None:
        if self._asked is None:
            return
        asked, self._asked = self._asked, None
        order = [family for family, _ in asked]
        expected = self.naive.order(self._need, asked)
        assert order == (expected if self._exhausted else expected[: len(order)])
        self.compared += len(order)

    def finish(self) -> None:
        """Compares everything that is left, too."""
        for _ in self.victims(len(self.real), lambda family: True):
            pass
        self.compare()
        assert self.real.counters() == {key: self.naive.counts[key] for key in self.real.counters()}
        assert (len(self.real), self.real.ghosts) == (len(self.naive.blocks), len(self.naive.ghosts))


@pytest.fixture(autouse=True)
def _short_lessons(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """So that short traffic teaches something, and what was learnt soon counts."""
    monkeypatch.setattr(caution, "STEP_UP", 0.2)
    if "_recorded_" not in request.node.name:
        monkeypatch.setattr(lessons, "LESSON_BLOCKS", 96)


# ---- made-up traffic

Path = tuple[int, ...]
"""Says what is in a block: the branches from the head on."""


class Life:
    """A tier of so many places that lives dangerously. Ids are used again, the lowest first."""

    def __init__(self, seed: int, places: int) -> None:
        self.dice = random.Random(seed)
        self.both = BothDensities()
        self.places = places
        self.ids: dict[Path, FamilyId] = {}
        self.paths: dict[FamilyId, Path] = {}
        self.prompts: list[Path] = []
        self.open: list[Path] = []
        """Prompts of which a part is still to come."""

    def step(self) -> None:
        act = self.dice.random()
        if act < 0.55 or not self.paths:
            self.ask(self.prompt())
        elif act < 0.7 and self.open:
            self.go_on(self.open.pop(self.dice.randrange(len(self.open))))
        elif act < 0.75:
            self.use_a_part()
        elif act < 0.8:
            self.lose(self.dice.choice(list(self.paths.values())))
        elif act < 0.9:
            self.lose(*self.dice.sample(sorted(self.leaves()), min(3, len(self.leaves()))))
        elif act < 0.95:
            self.look()
        elif act < 0.97:
            self.renew()
        else:
            self.odd_call()

    def prompt(self) -> Path:
        """One that was there before, one that goes on from such a one, or a new one."""
        past: Path = ()
        if self.prompts and self.dice.random() < 0.8:
            past = self.dice.choice(self.prompts[-60:])
            if self.dice.random() < 0.5:
                past = past[: self.dice.randint(0, len(past))]
        if past and self.dice.random() < 0.1:
            past = (~past[0], *past[1:])  # the same prompt in another namespace
        length = self.dice.choice((0, 1, 2, 5, 11, 20))
        whole = past + tuple(self.dice.randrange(1 << 30) for _ in range(length))
        self.prompts.append(whole[:60])
        return self.prompts[-1]

    def ask(self, whole: Path) -> None:
        """Uses what is there from the head on, and computes the rest, or a part of it."""
        hits = next((at for at in range(len(whole)) if whole[: at + 1] not in self.ids), len(whole))
        if hits and self.dice.random() < 0.9:
            self.both.on_hit([self.ids[whole[: at + 1]] for at in range(hits)])
        self.go_on(whole)

    def go_on(self, whole: Path) -> None:
        missing = [whole[: at + 1] for at in range(len(whole)) if whole[: at + 1] not in self.ids]
        if len(missing) > 1 and self.dice.random() < 0.5:
            missing = missing[: self.dice.randint(1, len(missing))]
            self.open = [*self.open[-5:], whole]
        self.make_room(len(missing), {whole[:at] for at in range(len(whole))})
        self.insert(missing[: self.places - len(self.ids)])

    def make_room(self, count: int, keep: set[Path]) -> None:
        need = count - (self.places - len(self.ids))
        gone: list[FamilyId] = []
        if need > 0:
            kids = Counter(path[:-1] for path in self.ids)
            kids.update(keep)
            for victim in self.both.victims(need, lambda family: not kids[self.paths[family]]):
                gone.append(victim)
                kids[self.paths[victim][:-1]] -= 1
                if len(gone) == need:
                    break
            self.forget(gone, evicted=True)

    def insert(self, new: list[Path]) -> None:
        if not new:
            return
        infos = []
        for path in new:
            ident = next(FamilyId(number) for number in range(200) if number not in self.paths)
            self.ids[path], self.paths[ident] = ident, path
            infos.append(self.info(path))
        chain = all(after.parent == info.id for info, after in itertools.pairwise(infos))
        if chain and self.dice.random() < 0.7:
            ids, names = [info.id for info in infos], [info.block_hash for info in infos]
            self.both.on_insert(InfoRun(ids, infos[0].parent, infos[0].depth, 1, 0, names))
        else:
            self.both.on_insert(infos)

    def info(self, path: Path) -> BlockInfo:
        content = max(path[0], ~path[0]), *path[1:]
        digest = hashlib.sha256(repr(content).encode()).digest()[:9]
        name = bytes([digest[0] % 64]) + digest[1:]  # one in four is remembered
        return BlockInfo(self.ids[path], self.ids.get(path[:-1]), len(path) - 1, 1, block_hash=name)

    def use_a_part(self) -> None:
        """Of a prompt, not from its head on, with some that are not here between them; one of them twice, maybe."""
        whole = self.dice.choice(self.prompts)
        start = self.dice.randint(0, len(whole))
        used = [self.ids.get(whole[: at + 1], FamilyId(1 << 21)) for at in range(start, len(whole))]
        self.both.on_hit(used + used[-1:] * (self.dice.random() < 0.3))

    def lose(self, *paths: Path) -> None:
        self.forget([self.ids[path] for path in paths], evicted=self.dice.random() < 0.3)

    def leaves(self) -> set[Path]:
        return set(self.ids) - {path[:-1] for path in self.ids}

    def look(self) -> None:
        """Without taking anybody, and where some may not leave for no reason."""
        fixed = {family for family in self.paths if self.dice.random() < 0.3}
        wanted = self.dice.randint(1, 2 * len(self.paths))
        for count, _ in enumerate(self.both.victims(self.dice.randint(1, 20), lambda one: one not in fixed)):
            if count == wanted:
                break

    def renew(self) -> None:
        path = self.dice.choice(list(self.ids))
        self.both.on_insert([self.info(path)])

    def odd_call(self) -> None:
        """In any order, given twice, not here, as other kinds of sequences; behind anybody; leaving at random."""
        some = [self.dice.choice(list(self.paths)) for _ in range(self.dice.randint(1, 9))]
        act = self.dice.randrange(4)
        if act == 0:
            ids = [*some, FamilyId(777), some[0]]
            self.both.on_hit(self.dice.choice((ids, tuple(ids), array("q", ids))))  # type: ignore[arg-type]
        elif act == 1:
            self.both.on_hit(range(some[0], some[0] + len(some)))  # type: ignore[arg-type]
        elif act == 2:
            self.both.on_insert([BlockInfo(some[0], self.dice.choice((None, some[-1], FamilyId(777))), 3, 1)])
        else:
            for family in set(some):
                del self.ids[self.paths.pop(family)]
            self.both.on_remove(tuple(some), evicted=False)

    def forget(self, gone: list[FamilyId], *, evicted: bool) -> None:
        for family in gone:
            del self.ids[self.paths.pop(family)]
        self.both.on_remove(gone, evicted=evicted)


@pytest.mark.parametrize("seed", range(15))
def test_made_up_life(seed: int) -> None:
    life = Life(seed, places=(12, 40, 120)[seed % 3])
    for _ in range(200):
        life.step()
    life.both.finish()
    assert life.both.compared > 150
    assert life.both.naive.counts["lessons"] > 5
    assert life.both.naive.counts["recognised"] > 0


@pytest.mark.parametrize("ids", [[0, 1, 2, 2], [2, 2], [0, 1, 2, 0], [1, 2, 3, 3, 1]])
def test_an_id_that_is_given_twice_counts_once(ids: list[int]) -> None:
    both = BothDensities()
    whole = [FamilyId(ident) for ident in range(4)]
    both.on_insert(InfoRun(whole, None, 0, 1, 0, [bytes([ident]) for ident in whole]))
    both.on_hit([FamilyId(ident) for ident in ids])
    assert both.counters()["hit"] == len(set(ids))
    both.finish()


@pytest.mark.parametrize("ids", [[1, 2, 1], [1, 1], [1, 2, 3, 2], [5, 5, 5, 6]])
def test_an_id_that_comes_in_twice_is_here_once(ids: list[int]) -> None:
    both = BothDensities()
    both.on_insert(InfoRun(list(map(FamilyId, ids)), None, 0, 1, 0, [bytes([ident]) for ident in ids]))
    assert len(both.real) == len(set(ids))
    assert set(both.victims(9, lambda family: True)) == set(ids)
    both.finish()


# ---- what a walk meets


@pytest.mark.parametrize("seed", range(5))
def test_a_walk_goes_on_while_others_come_and_go(seed: int) -> None:
    """Each victim is one that is here at that time, and none comes twice."""
    dice = random.Random(seed)
    policy = DensityPolicy()
    here: dict[FamilyId, BlockInfo] = {}
    fresh = itertools.count(1)

    def come() -> None:
        parent = dice.choice([None, *here])
        for _ in range(dice.randint(1, 12)):
            info = BlockInfo(FamilyId(next(fresh)), parent, 0, 1)
            here[info.id], parent = info, info.id
            policy.on_insert([info])

    for _ in range(40):
        come()
    for _ in range(40):
        given: list[FamilyId] = []
        asked: list[FamilyId] = []

        def may_leave(family: FamilyId, asked: list[FamilyId] = asked) -> bool:
            assert family in here
            asked.append(family)
            return family % 5 > 0

        for victim in policy.victims(5, may_leave):
            given.append(victim)
            act = dice.random()
            if act < 0.3:
                policy.on_hit(dice.sample(sorted(here), min(9, len(here))))
            elif act < 0.6:
                gone = dice.sample(sorted(here), min(2, len(here)))
                for family in gone:
                    del here[family]
                policy.on_remove(gone, evicted=True)
            elif act < 0.8:
                come()
        assert len(set(asked)) == len(asked) <= 84
        assert len(given) >= min(5, len(here) // 2)
        come()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One for each entry of a queue that is looked at."""
    looked: list[object] = []
    real = leaves.LeafQueues.stands_for

    def counting(self: leaves.LeafQueues, entry: leaves.Entry, kind: int) -> bool:
        looked.append(entry)
        return real(self, entry, kind)

    monkeypatch.setattr(leaves.LeafQueues, "stands_for", counting)
    return looked


@pytest.mark.parametrize("children", [False, True])
def test_what_a_walk_went_past_is_put_right_for_the_next(
    monkeypatch: pytest.MonkeyPatch, *, children: bool
) -> None:
    """The coldest leaf may not leave, and all behind it have been used since, or are leaves no more."""
    policy = DensityPolicy()
    everybody = list(map(FamilyId, range(800)))
    policy.on_insert([BlockInfo(family, None, 0, 1) for family in everybody])
    for family in everybody * 4 + everybody[1:]:
        policy.on_hit([family])
    if children:
        policy.on_insert([BlockInfo(FamilyId(family + 800), family, 1, 1) for family in everybody[1:]])
    looked = counted(monkeypatch)
    for _ in range(3):
        looked.clear()
        assert next(policy.victims(1, lambda family: family > 0)) == (801 if children else 1)
    assert len(looked) < 40


def test_the_first_walk_after_many_uses_takes_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes one of the coldest that it meets; in the end the order is right again."""
    policy = DensityPolicy()
    everybody = list(map(FamilyId, range(20_000)))
    for family in everybody:
        policy.on_insert([BlockInfo(family, None, 0, 1)])
    for family in everybody * 4:
        policy.on_hit([family])
    for _ in range(10):
        victim = next(policy.victims(1, lambda family: True))
    assert victim == 0
    for family in everybody:
        policy.on_hit([family])
    looked = counted(monkeypatch)
    assert next(policy.victims(1, lambda family: True)) < 10_000
    assert len(looked) < 3 * leaves._MOST_WRONG


def test_a_prompt_is_cleared_from_its_head_without_a_cut_at_each_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = DensityPolicy()
    whole = list(map(FamilyId, range(2048)))
    policy.on_insert(InfoRun(whole, None, 0, 1, 0))
    cuts: list[int] = []
    real = Segments.cut

    def counting(self: Segments, segment: Segment, at: int) -> tuple[Segment, Segment]:
        cuts.append(at)
        return real(self, segment, at)

    monkeypatch.setattr(Segments, "cut", counting)
    for start in range(0, 2048, 256):
        policy.on_remove(whole[start : start + 256], evicted=False)
    assert len(policy) == 0
    assert len(cuts) < 20


@pytest.mark.parametrize("tier", [OneTier, BareTier])
@pytest.mark.parametrize("seed", range(2))
def test_made_up_prompts(tier: type[OneTier], seed: int) -> None:
    trace = made_up(seed, requests=150)
    both = BothDensities()
    through(tier(trace, 60, both), trace)
    both.finish()
    assert both.compared > 150
    assert tier is BareTier or not both.naive.counts["alike"]


@pytest.mark.parametrize("name", NAMES)
def test_recorded_prompts(name: str) -> None:
    trace = piece(name, {"conv_a": 150, "synth_a": 200, "agentic_a": 10}[name])
    both = BothDensities()
    through(OneTier(trace, capacity(trace, 5), both), trace)
    both.finish()
    assert both.compared > 300
    assert not both.naive.counts["alike"]
