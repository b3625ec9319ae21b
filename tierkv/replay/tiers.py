"""Several tiers: host RAM, and colder ones that it writes to and loads from, with the store's rules and no bytes.

The policies are the real ones and are asked what the store asks them: host RAM's eviction, each colder tier's admission
and eviction, and the promotion of each run that would be loaded, with a quote from the speeds that the user gives. The
rules about chains are the store's too (``tierkv.room``, ``tierkv.picking``): only leaves leave, a block is written
behind its ancestors, which go along, a last copy stays as long as anything hangs from it. What takes time in the store
takes none here: a write is over when it is begun, and a block is written when host RAM evicts it (``on_evict``) or when
it is stored (``through``), not some time ahead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

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
from tierkv.replay.held import PolicyFailed
from tierkv.replay.traces import NO_PARENT, Trace, TraceClock
from tierkv.tier import Usage

WriteRule = Literal["through", "on_evict", "never"]
_MOST_PASSES = 64
_TELL_EVERY = 256
_SERVED_PRIORITY = -1


@dataclass(frozen=True)
class Cold:
    """A colder tier as it is asked for. ``eviction`` is ``None`` for a server that evicts on its own, by LRU."""

    name: str
    capacity: int
    """Blocks."""
    eviction: Callable[[], EvictionPolicy] | None
    admission: Callable[[], AdmissionPolicy]
    write: WriteRule = "on_evict"
    read_bytes_per_s: float | None = None
    read_latency_s: float = 0.0


@dataclass
class Counts:
    """What a replay counted, in blocks. By tier, where it says so."""

    references: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    """Given to requests, by the tier where they were found."""
    late_references: int = 0
    late_hits: int = 0
    hit_tokens: int = 0
    written: dict[str, int] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    evicted: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    """By the tier's admission, or for want of room."""
    recomputed: int = 0
    """There, and not loaded since the promotion policy said so."""
    computed: int = 0
    """That entered host RAM from an engine."""

    @property
    def hit_blocks(self) -> int:
        return sum(self.hits.values())

    @property
    def hit_percent(self) -> float:
        return 100 * self.hit_blocks / self.references if self.references else 0.0

    @property
    def late_hit_percent(self) -> float:
        return 100 * self.late_hits / self.late_references if self.late_references else 0.0


class _Tier:
    """Which blocks a tier holds. ``policy`` is ``None`` for a server, whose order is kept here."""

    def __init__(self, name: str, capacity: int, policy: EvictionPolicy | None, blocks: int) -> None:
        self.name = name
        self.capacity = capacity
        self.policy = policy
        self.here = bytearray(blocks)
        self.children = [0] * blocks
        self.used = 0
        self.server: OrderedDict[int, None] = OrderedDict()

    def usage(self, block_bytes: int) -> Usage:
        free = (self.capacity - self.used) * block_bytes
        return Usage(self.capacity * block_bytes, self.used * block_bytes, self.used, free)


class Tiers:
    """Host RAM and colder tiers, of one trace. Not thread-safe."""

    def __init__(
        self,
        trace: Trace,
        host_blocks: int,
        eviction: EvictionPolicy,
        promotion: PromotionPolicy,
        cold: Sequence[Cold],
        *,
        block_bytes: int,
        s_per_token: float | None = None,
    ) -> None:
        """``eviction`` must know priorities. ``s_per_token``: what a token takes the engine, where it is known."""
        self._parents = trace.parents
        self._hashes = trace.hashes
        self._block_tokens = trace.block_tokens
        self._block_bytes = block_bytes
        self._s_per_token = s_per_token
        self._promotion = promotion
        blocks = trace.blocks
        self.host = _Tier("host", host_blocks, eviction, blocks)
        self._asked = list(cold)
        self.cold = [
            _Tier(one.name, one.capacity, None if one.eviction is None else one.eviction(), blocks)
            for one in cold
        ]
        self._admissions = [one.admission() for one in cold]
        self._settled = [bytearray(blocks) for _ in cold]
        """By tier and block in host RAM: it is there or was refused."""
        self._depths = _depths(self._parents)
        self.counts = Counts(hits={"host": 0})
        for one in cold:
            for counted in (self.counts.hits, self.counts.written, self.counts.loaded, self.counts.refused):
                counted[one.name] = 0
        self.counts.evicted = {tier.name: 0 for tier in (self.host, *self.cold)}

    # -- a request ------------------------------------------------------------------------------------------------

    def request(self, ids: list[int]) -> int:
        """One prompt; returns how many of its blocks were given."""
        found = self._match(ids)
        hits = self._load(ids, found)
        host, counts = self.host, self.counts
        for source in found[:hits]:
            counts.hits[source] += 1
        counts.hit_tokens += hits * self._block_tokens
        if hits:
            used = [FamilyId(ident) for ident in ids[:hits]]
            for tier in (host, *self.cold):
                if tier.policy is not None:
                    tier.policy.on_hit(used)
        self._store(ids, hits)
        return hits

    def _match(self, ids: list[int]) -> list[str]:
        """Where each block of the longest prefix is that some tier holds."""
        tiers = (self.host, *self.cold)
        found: list[str] = []
        for ident in ids:
            for tier in tiers:
                if tier.here[ident]:
                    found.append(tier.name)
                    break
            else:
                break
        return found

    def _load(self, ids: list[int], found: list[str]) -> int:
        """Brings what is not in host RAM there, as far as the promotion policy wants it. Returns how many of the blocks
        the request is given."""
        given = len(found)
        serve = False
        for place, tier in enumerate(self.cold):
            run = [at for at in range(given) if found[at] == tier.name]
            if not run:
                continue
            decision = self._promotion.decide(
                self._quote(place, ids, run), self.host.usage(self._block_bytes)
            )
            if decision is Promotion.RECOMPUTE:
                self.counts.recomputed += len(run)
                given = run[0]
            serve = serve or decision is Promotion.SERVE
        missing = [at for at in range(given) if found[at] != "host"]
        if not missing:
            return given
        for tier in self.cold:
            if tier.policy is None:  # what is read is used, before what makes room for it is written there
                for at in missing:
                    if tier.name == found[at]:
                        tier.server.move_to_end(ids[at])
        came = self._into_host(ids, missing, _SERVED_PRIORITY if serve else 0)
        for at in missing[:came]:
            self.counts.loaded[found[at]] += 1
        return missing[came] if came < len(missing) else given

    def _quote(self, place: int, ids: list[int], run: list[int]) -> LoadQuote:
        asked = self._asked[place]
        size = len(run) * self._block_bytes
        tokens = len(run) * self._block_tokens
        load_s = (
            None if asked.read_bytes_per_s is None else asked.read_latency_s + size / asked.read_bytes_per_s
        )
        compute_s = None if self._s_per_token is None else tokens * self._s_per_token
        return LoadQuote(asked.name, len(run), size, tokens, load_s, compute_s, self._hashes[ids[run[-1]]])

    def _store(self, ids: list[int], hits: int) -> None:
        new = [at for at in range(hits, len(ids)) if not self.host.here[ids[at]]]
        if not new:
            return
        self.counts.computed += self._into_host(ids, new, 0)
        for place, asked in enumerate(self._asked):
            stored = [ids[at] for at in new if self.host.here[ids[at]]]
            if asked.write == "through" and stored:
                self._clean(place, stored[-1])

    # -- host RAM -------------------------------------------------------------------------------------------------

    def _into_host(self, ids: list[int], places: list[int], priority: int) -> int:
        """Blocks of a prompt enter host RAM, from its front on. Returns how many."""
        host, parents = self.host, self._parents
        keep = {ids[at - 1] for at in places if at} - {ids[at] for at in places}
        self._make_room(len(places), keep)
        count = min(len(places), host.capacity - host.used)
        infos = []
        for at in places[:count]:
            ident = ids[at]
            host.here[ident] = 1
            parent = parents[ident]
            if parent != NO_PARENT:
                host.children[parent] += 1
            for settled, tier in zip(self._settled, self.cold, strict=True):
                settled[ident] = tier.here[ident]
            infos.append(self._info(ident, priority))
        host.used += count
        if infos:
            assert host.policy is not None
            host.policy.on_insert(infos)
        return count

    def _info(self, ident: int, priority: int = 0) -> BlockInfo:
        parent = self._parents[ident]
        return BlockInfo(
            FamilyId(ident),
            None if parent == NO_PARENT else FamilyId(parent),
            self._depths[ident],
            self._block_bytes,
            0,
            priority,
            None,
            None if self._s_per_token is None else self._s_per_token * self._block_tokens,
            self._hashes[ident],
        )

    def _make_room(self, count: int, keep: set[int]) -> None:
        host, parents = self.host, self._parents

        def may_leave(family: FamilyId) -> bool:
            return bool(host.here[family]) and not host.children[family] and family not in keep

        for _ in range(_MOST_PASSES):
            need = count - (host.capacity - host.used)
            if need <= 0:
                return
            gone: list[FamilyId] = []
            assert host.policy is not None
            for family in host.policy.victims(need, may_leave):
                self._write_before_it_leaves(family)
                gone.append(family)
                host.here[family] = 0
                if parents[family] != NO_PARENT:
                    host.children[parents[family]] -= 1
                if len(gone) == need:
                    break
            if not gone:
                return
            host.used -= len(gone)
            self.counts.evicted["host"] += len(gone)
            host.policy.on_remove(gone, evicted=True)

    # -- colder tiers ---------------------------------------------------------------------------------------------

    def _write_before_it_leaves(self, ident: int) -> None:
        for place, (tier, asked) in enumerate(zip(self.cold, self._asked, strict=True)):
            if tier.children[ident] and not tier.here[ident] and tier.policy is not None:
                self._settled[place][ident] = 0  # what hangs from it there needs it
                self._clean(place, ident)
            elif asked.write == "on_evict":
                self._clean(place, ident)

    def _clean(self, place: int, ident: int) -> None:
        """Writes a block of host RAM to a tier, behind those of its ancestors that the tier lacks, if admission lets it
        in (``Picked.add_with_ancestors``)."""
        tier, settled, host = self.cold[place], self._settled[place], self.host
        if settled[ident]:
            return
        line = [ident]
        while True:
            parent = self._parents[line[-1]]
            if parent == NO_PARENT or not host.here[parent] or tier.here[parent]:
                break
            line.append(parent)
        line.reverse()
        admitted = self._admitted(place, line)
        written = self._write(place, line[:admitted])
        for one in line:
            if not settled[one]:
                settled[one] = 1
                self.counts.refused[tier.name] += not tier.here[one]
        self.counts.written[tier.name] += written

    def _admitted(self, place: int, line: list[int]) -> int:
        tier, admission = self.cold[place], self._admissions[place]
        parent = self._parents[line[0]]
        reachable = tier.policy is None or parent == NO_PARENT or bool(tier.here[parent])
        count = 0
        for at, ident in enumerate(line, 1):
            if self._settled[place][ident]:
                continue
            if tier.children[ident]:
                verdict = Verdict.ADMIT
            else:
                verdict = admission.admit(
                    self._info(ident), self._hashes[ident], tier.usage(self._block_bytes)
                )
            if not reachable:
                verdict = Verdict.REJECT
            if verdict is Verdict.ADMIT:
                count = at
            elif verdict is Verdict.THROTTLE:
                break
        return count

    def _write(self, place: int, line: list[int]) -> int:
        """Blocks that follow each other, as far as there is room. Returns how many were not there before."""
        tier = self.cold[place]
        new = [ident for ident in line if not tier.here[ident]]
        if not new:
            return 0
        if len(new) > tier.capacity - tier.used:
            self._evict_from(place, len(new) - (tier.capacity - tier.used), set(line))
            del new[tier.capacity - tier.used :]
        infos = []
        for ident in new:
            tier.here[ident] = 1
            self._settled[place][ident] = 1
            parent = self._parents[ident]
            if parent != NO_PARENT:
                tier.children[parent] += 1
            infos.append(self._info(ident))
        tier.used += len(new)
        if tier.policy is None:
            tier.server.update(dict.fromkeys(new))
        elif infos:
            tier.policy.on_insert(infos)
        return len(new)

    def _evict_from(self, place: int, need: int, keep: set[int]) -> None:
        tier = self.cold[place]
        for _ in range(_MOST_PASSES):
            gone: list[FamilyId] = []
            for ident in self._victims(tier, need, keep):
                gone.append(ident)
                tier.here[ident] = 0
                if self._parents[ident] != NO_PARENT:
                    tier.children[self._parents[ident]] -= 1
                self._settled[place][ident] = 1  # host RAM does not write it back for its own sake
                if len(gone) == need:
                    break
            if not gone:
                return
            need -= len(gone)
            tier.used -= len(gone)
            self.counts.evicted[tier.name] += len(gone)
            if tier.policy is not None:
                tier.policy.on_remove(gone, evicted=True)
            else:
                for ident in gone:
                    del tier.server[ident]
            if not need:
                return

    def _victims(self, tier: _Tier, need: int, keep: set[int]) -> Iterator[FamilyId]:
        if tier.policy is None:
            return iter([FamilyId(ident) for ident in islice(tier.server, need)])
        others = [
            other for other in (self.host, *self.cold) if other is not tier and other.policy is not None
        ]

        def may_leave(family: FamilyId) -> bool:
            if not tier.here[family] or tier.children[family] or family in keep:
                return False
            if any(other.here[family] for other in others):
                return True
            return not any(other.children[family] for other in others)

        return tier.policy.victims(need, may_leave)


def _depths(parents: list[int]) -> list[int]:
    """Blocks before each; a parent appears before its children."""
    depths = [0] * len(parents)
    for ident, parent in enumerate(parents):
        if parent != NO_PARENT:
            depths[ident] = depths[parent] + 1
    return depths


def replay_tiers(
    tiers: Tiers,
    trace: Trace,
    progress: Callable[[float], None] = lambda share: None,
    *,
    clock: TraceClock | None = None,
    told: Callable[[int], None] = lambda hits: None,
) -> Counts:
    """The whole trace through tiers that are made for it. ``progress`` is told how much is done, from 0 to 1, ``told``
    how many blocks each request was given, ``clock`` what time it is. Raises ``ConfigError`` where a policy that is
    held to its protocol breaks it."""
    counts, half = tiers.counts, len(trace.requests) // 2
    clock = TraceClock() if clock is None else clock
    for number, request in enumerate(trace.requests):
        if number % _TELL_EVERY == 0:
            progress(number / len(trace.requests))
        clock.at_s = request.at_s
        try:
            hits = tiers.request(request.ids)
        except PolicyFailed as failed:
            raise failed.at(number + 1, counts.references, len(request.ids)) from failed
        told(hits)
        counts.references += len(request.ids)
        if number >= half:
            counts.late_references += len(request.ids)
            counts.late_hits += hits
    return counts
