"""LruPolicy beside a list that does the same slowly, and what its cells promise."""

import random
from collections.abc import Iterator, Sequence
from itertools import islice

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierkv.ids import FamilyId
from tierkv.policies import lru
from tierkv.policies.lru import CELL_IDS, FEW_IDS, LruPolicy
from tierkv.policy import BlockInfo
from tierkv.testing.eviction import EvictionPolicyContract


def info(family: int, parent: int | None = None, *, depth: int = 0, priority: int = 0) -> BlockInfo:
    before = None if parent is None else FamilyId(parent)
    return BlockInfo(FamilyId(family), before, depth, 1 << 20, priority=priority)


def chain(ids: Sequence[int], parent: int | None = None, *, priority: int = 0) -> list[BlockInfo]:
    before = [parent, *ids[:-1]]
    return [info(family, before[i], depth=i, priority=priority) for i, family in enumerate(ids)]


def families(ids: Sequence[int]) -> list[FamilyId]:
    return [FamilyId(family) for family in ids]


def order(policy: LruPolicy) -> list[int]:
    """Everybody, coldest first."""
    return list(policy.victims(len(policy), lambda _: True))


def check_cells(policy: LruPolicy) -> None:
    """The column, the cells and the rings say the same."""
    held = {}
    linked = []
    assert policy._priorities == sorted(policy._ends)
    for priority, end in policy._ends.items():
        cell = end.hotter
        assert cell is not end, f"priority {priority} has an empty ring"
        while cell is not end:
            assert policy._cells[cell.number] is cell
            assert cell.priority == policy._priority_of_cell[cell.number] == priority
            assert cell.hotter.colder is cell
            assert cell.colder.hotter is cell
            assert 1 <= len(cell.ids) <= lru.CELL_IDS
            linked.append(cell.number)
            for family in cell.ids:
                assert family not in held, f"{family} stands in two cells"
                held[family] = cell.number
            cell = cell.hotter
    assert held == {family: number for family, number in enumerate(policy._where) if number}
    assert len(held) == len(policy)
    assert sorted([0, *linked, *policy._spare_numbers]) == list(range(len(policy._cells)))


class SlowLru:
    """A list for each priority, cold to hot. One family after the other, no cleverness."""

    def __init__(self) -> None:
        self.lists: dict[int, list[int]] = {}

    def list_of(self, family: int | None) -> list[int] | None:
        return next((each for each in self.lists.values() if family in each), None)

    def insert(self, infos: Sequence[BlockInfo]) -> None:
        for each in infos:
            self.remove([each.id])
            mine = self.lists.setdefault(max(-127, min(127, each.priority)), [])
            if each.parent in mine:
                mine.insert(mine.index(each.parent), each.id)
            else:
                mine.append(each.id)

    def hit(self, ids: Sequence[int]) -> None:
        for family in reversed(dict.fromkeys(ids)):
            mine = self.list_of(family)
            if mine is not None:
                mine.remove(family)
                mine.append(family)

    def remove(self, ids: Sequence[int]) -> None:
        for family in ids:
            mine = self.list_of(family)
            if mine is not None:
                mine.remove(family)

    def order(self) -> list[int]:
        return [family for priority in sorted(self.lists) for family in self.lists[priority]]


class BesideTheSlowOne(RuleBasedStateMachine):
    """Random chains, stored at once or in chunks, hits, removals; ids are reused at once."""

    IDS = 1500

    @initialize(cell_ids=st.sampled_from([4, 16, CELL_IDS]))
    def begin(self, cell_ids: int) -> None:
        lru.CELL_IDS = cell_ids
        self.policy = LruPolicy(families=100)
        self.slow = SlowLru()

    def teardown(self) -> None:
        lru.CELL_IDS = CELL_IDS

    def some(self, dice: random.Random, count: int) -> list[int]:
        known = self.slow.order()
        return dice.sample(known, min(count, len(known)))

    @rule(
        length=st.sampled_from([1, 1, 2, 3, FEW_IDS, FEW_IDS + 1, 70, 200]),
        first=st.integers(0, IDS - 1),
        has_parent=st.booleans(),
        priority=st.sampled_from([0, 0, 0, 1, -1, 500]),
        dice=st.randoms(use_true_random=False),
    )
    def insert_chain(
        self, length: int, first: int, has_parent: bool, priority: int, dice: random.Random
    ) -> None:
        taken = set(self.slow.order())
        ids = [family % self.IDS for family in range(first, first + self.IDS)]
        fresh = [family for family in ids if family not in taken][:length]
        parents = self.some(dice, 1) if has_parent else []
        batch = chain(fresh, parents[0] if parents else None, priority=priority)
        self.policy.on_insert(batch)
        self.slow.insert(batch)

    @rule(dice=st.randoms(use_true_random=False), count=st.integers(1, 60))
    def insert_a_medley(self, dice: random.Random, count: int) -> None:
        """One call with families of several prompts, new and resident ones."""
        batch: list[BlockInfo] = []
        for family in dice.sample(range(self.IDS), count):
            parent = dice.choice([None, *[each.id for each in batch], *self.some(dice, 2)])
            if parent != family:
                batch.append(info(family, parent, priority=dice.choice([0, 0, 1])))
        self.policy.on_insert(batch)
        self.slow.insert(batch)

    @rule(dice=st.randoms(use_true_random=False), count=st.integers(0, 300), strangers=st.booleans())
    def hit(self, dice: random.Random, count: int, strangers: bool) -> None:
        used = self.some(dice, count)
        if strangers and used:
            used += [dice.randrange(2 * self.IDS), dice.choice(used)]
        self.policy.on_hit(families(used))
        self.slow.hit(used)

    @precondition(lambda self: self.slow.order())
    @rule(dice=st.randoms(use_true_random=False), count=st.integers(1, 300))
    def hit_a_stretch(self, dice: random.Random, count: int) -> None:
        """What stands together is hit together, as a prompt is."""
        known = self.slow.order()[::-1]
        start = dice.randrange(len(known))
        used = known[start : start + count]
        self.policy.on_hit(families(used))
        self.slow.hit(used)

    @rule(dice=st.randoms(use_true_random=False), count=st.integers(0, 300), evicted=st.booleans())
    def remove(self, dice: random.Random, count: int, evicted: bool) -> None:
        gone = self.some(dice, count)
        self.policy.on_remove(families(gone), evicted=evicted)
        self.slow.remove(gone)

    @rule(count=st.integers(1, 300))
    def evict(self, count: int) -> None:
        gone = list(islice(self.policy.victims(count, lambda _: True), count))
        assert gone == self.slow.order()[:count]
        self.policy.on_remove(gone, evicted=True)
        self.slow.remove(gone)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "policy"):
            assert order(self.policy) == self.slow.order()
            check_cells(self.policy)


TestBesideTheSlowOne = BesideTheSlowOne.TestCase
TestBesideTheSlowOne.settings = settings(
    max_examples=100, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class TestContract(EvictionPolicyContract):
    def make_policy(self) -> LruPolicy:
        return LruPolicy(families=1)


def test_the_least_recently_used_request_leaves_first() -> None:
    policy = LruPolicy()
    policy.on_insert(chain([1, 2, 3]))
    policy.on_insert(chain([11, 12]))
    policy.on_hit(families([1, 2]))
    assert order(policy) == [3, 12, 11, 2, 1]


@pytest.mark.parametrize("chunks", [[1] * 12, [5, 4, 3], [1, 11], [12]])
def test_d30_a_prompt_stored_in_chunks_lies_like_one_stored_at_once(chunks: list[int]) -> None:
    policy = LruPolicy()
    stored = 0
    for number, chunk in enumerate(chunks):
        ids = list(range(stored + 1, stored + chunk + 1))
        policy.on_insert(chain(ids, stored or None))
        policy.on_insert(chain([100 + number]))  # other requests come in between
        stored += chunk
    own = [family for family in order(policy) if family < 100]
    assert own == list(range(12, 0, -1))
    assert order(policy)[:12] == own, "a later chunk has the rank of the request that used its parent"


def test_d30_a_long_prompt_keeps_its_order_through_all_sizes_of_batch() -> None:
    policy = LruPolicy()
    ids = list(range(1, 8193))
    policy.on_insert(chain(ids))
    policy.on_hit(families(ids[:5000]))
    assert order(policy) == [*reversed(ids[5000:]), *reversed(ids[:5000])]
    policy.on_hit(families(ids))
    assert order(policy) == ids[::-1]
    check_cells(policy)


def test_d30_two_branches_leave_before_their_common_stem() -> None:
    policy = LruPolicy()
    policy.on_insert(chain([1, 2, 3]))
    policy.on_insert(chain([4, 5], 3))
    policy.on_insert(chain([6, 7], 3))
    assert order(policy) == [5, 4, 7, 6, 3, 2, 1]


def test_a_higher_priority_stays_longer() -> None:
    policy = LruPolicy()
    policy.on_insert(chain([1, 2], priority=5))
    policy.on_insert(chain([3, 4]))
    policy.on_insert(chain([5, 6], priority=-2))
    policy.on_hit(families([3, 5]))
    assert order(policy) == [6, 5, 4, 3, 2, 1]


def test_a_hit_of_two_priorities_renews_each_in_its_own_list() -> None:
    policy = LruPolicy()
    policy.on_insert(chain([1, 2, 3]))
    policy.on_insert(chain([4, 5, 6], 3, priority=1))
    policy.on_insert(chain([7]))
    policy.on_hit(families([1, 2, 3, 4]))
    assert order(policy) == [7, 3, 2, 1, 6, 5, 4]


def test_there_are_never_more_lists_than_priorities_that_count() -> None:
    policy = LruPolicy()
    for number in range(2000):
        policy.on_insert([info(number, priority=number - 1000)])
    assert len(policy._priorities) == 255
    assert order(policy) == list(range(2000))
    policy.on_remove(families(range(2000)), evicted=True)
    assert policy._priorities == []


def test_a_reused_id_starts_anew() -> None:
    policy = LruPolicy()
    policy.on_insert(chain([1, 2, 3]))
    policy.on_remove(families([3]), evicted=True)
    policy.on_insert(chain([4]))
    policy.on_insert(chain([3]))
    assert order(policy) == [2, 1, 4, 3]
    policy.on_remove(families([4, 3]), evicted=False)
    assert order(policy) == [2, 1]


def test_an_id_that_is_given_twice_is_one_family() -> None:
    policy = LruPolicy()
    policy.on_insert(chain(list(range(100))))
    policy.on_hit(families([5, 5]))
    policy.on_hit(families([*range(40), *range(40)]))
    policy.on_remove(families([7, 7, *range(50, 90), *range(50, 90)]), evicted=True)
    assert sorted(order(policy)) == [family for family in range(100) if family != 7 and not 50 <= family < 90]
    assert policy.counters() == {"inserted": 100, "hit": 41, "removed": 41, "evicted": 41}


def test_strangers_are_passed_over() -> None:
    policy = LruPolicy(families=10)
    policy.on_insert(chain([1, 2]))
    for strangers in ([3], [10_000], list(range(3, 200)), list(range(5000, 5200))):
        policy.on_hit(families(strangers))
        policy.on_remove(families(strangers), evicted=True)
    assert order(policy) == [2, 1]
    assert policy.counters()["removed"] == 0


def test_the_walk_meets_only_the_living() -> None:
    """However much has left from the cold end, one look finds the next victim."""
    policy = LruPolicy()
    policy.on_insert(chain(list(range(3000))))
    policy.on_remove(families(range(100, 3000)), evicted=True)
    asked: list[FamilyId] = []

    def evictable(family: FamilyId) -> bool:
        asked.append(family)
        return True

    assert next(policy.victims(1, evictable)) == 99
    assert asked == [99]


def test_victims_may_be_removed_while_the_walk_goes_on() -> None:
    policy = LruPolicy()
    policy.on_insert(chain(list(range(500))))
    gone: list[FamilyId] = []
    for family in policy.victims(200, lambda _: True):
        gone.append(family)
        policy.on_remove([family, FamilyId(family - 1)], evicted=True)
        if len(gone) == 150:
            break
    assert gone == list(range(499, 199, -2)), "what has left meanwhile is not proposed"
    check_cells(policy)


def test_sparse_cells_are_joined() -> None:
    policy = LruPolicy()
    ids = list(range(20_000))
    policy.on_insert(chain(ids))
    random.Random(3).shuffle(ids)
    for start in range(0, 19_500, 13):
        policy.on_remove(families(ids[start : start + 13]), evicted=True)
    cells = len(policy._cells) - 1 - len(policy._spare_numbers)
    assert cells <= len(policy) / (CELL_IDS / 8)
    check_cells(policy)


def test_single_inserts_fill_their_cells() -> None:
    policy = LruPolicy()
    for number in range(5000):
        policy.on_insert([info(number)])
    assert len(policy._cells) - 1 <= 5000 / CELL_IDS + 1
    for number in range(5000, 10_000):
        policy.on_insert([info(number, number - 1)])
    assert len(policy._cells) - 1 <= 10_000 / (CELL_IDS / 3)
    check_cells(policy)


@pytest.fixture(autouse=True)
def _cells_as_they_are() -> Iterator[None]:
    yield
    assert lru.CELL_IDS == CELL_IDS
