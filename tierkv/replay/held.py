"""Policies of third parties in a replay: what they raise, or answer against the protocol, ends in one clear error.

In the store a policy that fails is replaced (``tierkv.fallback``). A replay has to tell: figures of a policy that gave
up half-way would be those of another one. The bounds are those that the store holds a policy to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import index as as_index
from typing import Any

from tierkv.errors import ConfigError, TierKVError
from tierkv.ids import FamilyId
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


class PolicyFailed(TierKVError):
    """A policy raised, or said what its protocol does not allow."""

    def __init__(self, option: str, word: str, what: str) -> None:
        super().__init__(f"{word}: {what}")
        self.option = option
        """Of the command line: ``--policy``, say."""
        self.word = word
        self.what = what

    def at(self, request: int, before: int, count: int) -> ConfigError:
        """The error for people. It happened in the request of this number, counted from 1, which asks for ``count``
        blocks behind the ``before`` that were asked for so far."""
        where = f"in request {request:,}"
        if count:
            where += f" (block references {before + 1:,} to {before + count:,})"
        hint = f"the policy failed {where}: {self.what}; docs/policies.md says what its methods may rely on"
        return ConfigError(self.option, self.word, hint)


class _Held:
    def __init__(self, option: str, word: str) -> None:
        self._option = option
        self._word = word
        self._caught = Caught()

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        with self._caught:
            return call()
        raise self._failed(name, self._caught.error)

    def _failed(self, name: str, error: BaseException | None) -> PolicyFailed:
        words = " ".join(str(error).split())
        return self._wrong(f"{name} raised {type(error).__name__}{f': {words}' if words else ''}")

    def _wrong(self, what: str) -> PolicyFailed:
        return PolicyFailed(self._option, self._word, what)


class HeldEviction(_Held):
    """An ``EvictionPolicy`` over one that may fail. Raises ``PolicyFailed``."""

    def __init__(self, policy: EvictionPolicy, option: str, word: str) -> None:
        super().__init__(option, word)
        self.policy = policy
        self.name = word
        self.orders_priorities = bool(getattr(policy, "orders_priorities", False))

    def on_insert(self, infos: Sequence[BlockInfo]) -> None:
        self._call("on_insert", lambda: self.policy.on_insert(infos))

    def on_hit(self, ids: Sequence[FamilyId]) -> None:
        self._call("on_hit", lambda: self.policy.on_hit(ids))

    def on_remove(self, ids: Sequence[FamilyId], *, evicted: bool) -> None:
        self._call("on_remove", lambda: self.policy.on_remove(ids, evicted=evicted))

    def victims(self, need: int, evictable: Callable[[FamilyId], bool]) -> Iterator[FamilyId]:
        """What the policy names: families that it has asked about and that may leave, each once."""
        allowed: set[int] = set()
        left = 8 * need + 128  # twice what the protocol allows

        def asked(family: FamilyId) -> bool:
            nonlocal left
            left -= 1
            if left < 0:
                raise self._wrong(f"victims({need}, ...) looks at more than {8 * need + 128} blocks")
            row = as_index(family)
            if row < 0 or not evictable(FamilyId(row)):
                return False
            allowed.add(row)
            return True

        caught = Caught()
        with caught:
            for family in self.policy.victims(need, asked):
                row = as_index(family)
                if row not in allowed:
                    raise self._wrong(
                        f"victims names block {row}, for which evictable(...) was not asked or said no"
                    )
                allowed.remove(row)
                yield FamilyId(row)
            return
        error = caught.error
        raise error if isinstance(error, PolicyFailed) else self._failed("victims", error)

    def counters(self) -> Mapping[str, int]:
        found: Mapping[str, int] = self._call("counters", self.policy.counters)
        return found


class HeldAdmission(_Held):
    """An ``AdmissionPolicy`` over one that may fail. Raises ``PolicyFailed``."""

    def __init__(self, policy: AdmissionPolicy, option: str, word: str) -> None:
        super().__init__(option, word)
        self.policy = policy
        self.name = word

    def admit(self, info: BlockInfo, block_hash: bytes, usage: Usage) -> Verdict:
        verdict = self._call("admit", lambda: self.policy.admit(info, block_hash, usage))
        if not isinstance(verdict, Verdict):
            raise self._wrong(f"admit answered {verdict!r}, which is no Verdict")
        return verdict

    def counters(self) -> Mapping[str, int]:
        found: Mapping[str, int] = self._call("counters", self.policy.counters)
        return found


class HeldPromotion(_Held):
    """A ``PromotionPolicy`` over one that may fail. Raises ``PolicyFailed``."""

    def __init__(self, policy: PromotionPolicy, option: str, word: str) -> None:
        super().__init__(option, word)
        self.policy = policy
        self.name = word

    def decide(self, quote: LoadQuote, usage: Usage) -> Promotion:
        decision = self._call("decide", lambda: self.policy.decide(quote, usage))
        if not isinstance(decision, Promotion):
            raise self._wrong(f"decide answered {decision!r}, which is no Promotion")
        return decision

    def counters(self) -> Mapping[str, int]:
        found: Mapping[str, int] = self._call("counters", self.policy.counters)
        return found
