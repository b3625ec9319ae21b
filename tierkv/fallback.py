"""Policies that may fail: a plug-in that raises, or answers with what is no answer, is replaced by a built-in one.

Policies are called under the catalog's lock, in the middle of a change. What they raise must not break that change off
half done, nor reach the engine; and what raised once has an order of its own that nobody can trust any more. So the
first error retires the policy for good, with one line in the log, a count, and a reason in ``health``: eviction goes on
with ``lru`` (told in batches which families its tier holds), admission with ``always``, promotion with ``on_hit``.

The built-in eviction policy is replaced in the same way, should it ever fail: a fresh one starts from what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import index as as_index
from typing import Any, Final, Protocol

from tierkv.clock import Clock
from tierkv.ids import FamilyId
from tierkv.index import FamilyIndex
from tierkv.logs import RareLog
from tierkv.metrics import Counters
from tierkv.policies.always import AlwaysPolicy
from tierkv.policies.by_priority import ByPriority
from tierkv.policies.by_tenant import ByTenant
from tierkv.policies.lru import LruPolicy
from tierkv.policies.on_hit import OnHitPolicy
from tierkv.policy import (
    AdmissionPolicy,
    BlockInfo,
    EvictionPolicy,
    LoadQuote,
    Promotion,
    PromotionPolicy,
    Verdict,
)
from tierkv.supervision import Caught
from tierkv.tier import Usage

_FIRST_ROW: Final = 1
_LEARN_FAMILIES: Final = 256
"""What a successor is told of at once, since the lock is held."""


class Failures:
    """What has become of the policies of one store: who failed, how, and who goes on."""

    def __init__(self, clock: Clock, counters: Counters) -> None:
        self._log = RareLog(clock)
        self._counters = counters
        self.sentences: dict[str, str] = {}
        """By what the policy was for, for people."""

    def note(self, duty: str, failed: str, call: str, error: BaseException, successor: str) -> None:
        """``duty``: ``"eviction of host"``, say."""
        sentence = (
            f"policy {failed!r} ({duty}) failed in {call}: {error!r}; {successor!r} goes on in its place"
        )
        self.sentences[duty] = sentence
        self._counters.add(1, "policy_failures_total", duty)
        self._log.error(duty, "%s", sentence, cause=error)
        error.__traceback__ = None  # nobody needs what its frames hold


def _is_built_in(policy: EvictionPolicy) -> bool:
    """One of ours, which the contract has been through: its victims need not be checked one by one."""
    kind = policy.kind if type(policy) is ByPriority else type(policy)
    return kind.__module__.startswith("tierkv.policies.")


class WrongAnswer(TypeError):
    """A policy said what its protocol does not allow."""


class Books(Protocol):
    """What the store knows of its families."""

    index: FamilyIndex
    failures: Failures

    def info(self, family: FamilyId, tier: int) -> BlockInfo:
        """What a policy of that tier may know of a family."""
        ...


class SafeEviction:
    """An ``EvictionPolicy`` that never fails, over one that may. Under the catalog's lock, like all policies."""

    def __init__(
        self,
        policy: EvictionPolicy,
        tier_name: str,
        tier: int,
        books: Books,
    ) -> None:
        self.name = policy.name
        self.policy = policy
        self._duty = f"eviction of {tier_name}"
        self._tier = tier
        self._books = books
        self._caught = Caught()
        self._parked: set[int] = set()
        """Families that are pinned and were found in the way, see ``park``."""
        self._next_row = 0
        """Where the successor has yet to be told what the tier holds; 0 when it knows all."""
        self._by_tenant: ByTenant | None = None
        """The order of each tenant's own families; kept only where tenants have quotas."""
        self._next_row_by_tenant = 0

    @property
    def failed(self) -> str | None:
        """What happened to the policy that was chosen, in a sentence."""
        return self._books.failures.sentences.get(self._duty)

    @property
    def learning(self) -> bool:
        """True while the successor does not know yet all that the tier holds."""
        return self._next_row > 0

    def __len__(self) -> int:
        """Families that the policy knows of, where it says so, and those that are parked."""
        return len(self.policy) + len(self._parked)  # type: ignore[arg-type]

    def park(self, families: Sequence[FamilyId]) -> None:
        """Takes families out of the policy's order: they are pinned and lie at its cold end, and a policy looks at so
        many there and no further. Until ``unpark`` or ``on_remove``."""
        self.on_remove(families, evicted=False)
        self._parked.update(families)

    def unpark(self, family: FamilyId) -> None:
        """The last pin has gone: to the policy it is as if the family had just come."""
        if family in self._parked:
            self._parked.remove(family)
            self.on_insert([self._books.info(family, self._tier)])

    def is_parked(self, family: FamilyId) -> bool:
        return family in self._parked

    def order_tenants(self) -> bool:
        """From now on each tenant's own families are kept in their order as well. Learns of up to 256 families that are
        there; False while there may be more."""
        if self._by_tenant is None:
            self._by_tenant = ByTenant()
            self._next_row_by_tenant = _FIRST_ROW
        order, index = self._by_tenant, self._books.index
        if self._next_row_by_tenant:
            families, self._next_row_by_tenant = index.whole_from(
                self._tier, self._next_row_by_tenant, _LEARN_FAMILIES
            )
            new = [family for family in families if family not in self._parked and not order.knows(family)]
            order.on_insert([self._books.info(family, self._tier) for family in new])
        return not self._next_row_by_tenant

    def victims_of(self, tenant: int, need: int, evictable: Callable[[FamilyId], bool]) -> Iterator[FamilyId]:
        """Like ``victims``, of the families of the tenant with that tag alone."""
        if self._by_tenant is None:
            return iter(())
        return self._by_tenant.victims_of(tenant, need, evictable)

    def on_insert(self, infos: Sequence[BlockInfo]) -> None:
        if self._by_tenant is not None:
            self._by_tenant.on_insert(infos)
        self._tell_policy(infos)

    def _tell_policy(self, infos: Sequence[BlockInfo]) -> None:
        with self._caught:
            self.policy.on_insert(infos)
            return
        self._replace("on_insert", self._caught.error)
        with self._caught:  # were it to fail again: these are learnt with the others
            self.policy.on_insert(infos)

    def on_hit(self, ids: Sequence[FamilyId]) -> None:
        if self._by_tenant is not None:
            self._by_tenant.on_hit(ids)
        with self._caught:
            self.policy.on_hit(ids)
            return
        self._replace("on_hit", self._caught.error)

    def on_remove(self, ids: Sequence[FamilyId], *, evicted: bool) -> None:
        if self._parked and (parked := self._parked.intersection(ids)):
            self._parked -= parked
            ids = [family for family in ids if family not in parked]
        if self._by_tenant is not None:
            self._by_tenant.on_remove(ids, evicted=evicted)
        with self._caught:
            self.policy.on_remove(ids, evicted=evicted)
            return
        self._replace("on_remove", self._caught.error)

    def victims(self, need: int, evictable: Callable[[FamilyId], bool]) -> Iterator[FamilyId]:
        if self._next_row:
            self.learn()
        caught = Caught()
        with caught:
            if _is_built_in(self.policy):
                yield from self.policy.victims(need, evictable)
            else:
                yield from self._checked(need, evictable)
            return
        error = caught.error
        assert error is not None
        if _comes_from(error, evictable):
            raise error  # the store's own question failed, not the policy
        self._replace("victims", error)
        self.learn()
        yield from self.policy.victims(need, evictable)

    def _checked(self, need: int, evictable: Callable[[FamilyId], bool]) -> Iterator[FamilyId]:
        """What the policy names, held to the protocol: families that it has asked about, each once, in bounded time.
        One that it has not asked about may be leased."""
        allowed: set[int] = set()
        left = 8 * need + 128  # twice what the protocol allows

        def asked(family: FamilyId) -> bool:
            nonlocal left
            left -= 1
            row = as_index(family)
            if not 0 < row <= self._books.index.max_families or left < 0:
                raise WrongAnswer(f"it asks about family {family!r}, or about too many")
            if not evictable(FamilyId(row)):
                return False
            allowed.add(row)
            return True

        for family in self.policy.victims(need, asked):
            row = as_index(family)
            if row not in allowed:
                raise WrongAnswer(f"it names family {family!r}, which may not leave")
            allowed.remove(row)
            yield FamilyId(row)

    def counters(self) -> Mapping[str, int]:
        with self._caught:
            return self.policy.counters()
        return {}

    def learn(self) -> None:
        """Tells a successor of up to 256 more families that were there before it."""
        if self._next_row:
            index, info = self._books.index, self._books.info
            families, self._next_row = index.whole_from(self._tier, self._next_row, _LEARN_FAMILIES)
            known = [info(family, self._tier) for family in families if family not in self._parked]
            if known:
                self._tell_policy(known)

    def _replace(self, call: str, error: BaseException | None) -> None:
        assert error is not None
        self._books.failures.note(self._duty, self.policy.name, call, error, LruPolicy.name)
        self.policy = LruPolicy()
        self._next_row = _FIRST_ROW


def safe(policy: EvictionPolicy | None, tier_name: str, tier: int, books: Books) -> SafeEviction | None:
    """The policy of a tier, made safe; ``None`` for a tier that evicts on its own."""
    return None if policy is None else SafeEviction(policy, tier_name, tier, books)


class SafeAdmission:
    """An ``AdmissionPolicy`` that never fails. Under the catalog's lock."""

    def __init__(self, policy: AdmissionPolicy, duty: str, failures: Failures) -> None:
        self.name = policy.name
        self.policy = policy
        self._duty = duty
        self._failures = failures
        self._caught = Caught()

    def admit(self, info: BlockInfo, block_hash: bytes, usage: Usage) -> Verdict:
        with self._caught:
            verdict: Any = self.policy.admit(info, block_hash, usage)
            if not isinstance(verdict, Verdict):
                raise WrongAnswer(f"it says {verdict!r}")
            return verdict
        error = self._caught.error
        assert error is not None
        self._failures.note(self._duty, self.policy.name, "admit", error, AlwaysPolicy.name)
        self.policy = AlwaysPolicy()
        return Verdict.ADMIT

    def counters(self) -> Mapping[str, int]:
        with self._caught:
            return self.policy.counters()
        return {}


class SafePromotion:
    """A ``PromotionPolicy`` that never fails. Under a lock of its own: it looks at nothing that others change."""

    def __init__(self, policy: PromotionPolicy, duty: str, failures: Failures) -> None:
        self.name = policy.name
        self.policy = policy
        self._duty = duty
        self._failures = failures
        self._caught = Caught()

    def decide(self, quote: LoadQuote, usage: Usage) -> Promotion:
        with self._caught:
            decision: Any = self.policy.decide(quote, usage)
            if not isinstance(decision, Promotion):
                raise WrongAnswer(f"it says {decision!r}")
            return decision
        error = self._caught.error
        assert error is not None
        self._failures.note(self._duty, self.policy.name, "decide", error, OnHitPolicy.name)
        self.policy = OnHitPolicy()
        return Promotion.PROMOTE

    def counters(self) -> Mapping[str, int]:
        with self._caught:
            return self.policy.counters()
        return {}


def _comes_from(error: BaseException, call: Callable[..., Any]) -> bool:
    """True when the error was raised inside ``call``."""
    code = getattr(call, "__code__", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is code:
            return True
        trace = trace.tb_next
    return False
