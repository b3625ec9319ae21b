"""One of a soak's threads: every verb in random order, and every byte that comes back compared with what it must be."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import CancelledError

import numpy as np
from numpy.typing import NDArray

from bench.soak_measure import Control, Waits
from bench.soak_rig import BLOCK_TOKENS, Rig
from tierkv.copier import LayerPages, PagedKV
from tierkv.handles import Lease
from tierkv.index import NO_SLOT
from tierkv.keys import Chain
from tierkv.namespaces import OpenNamespace
from tierkv.retention import Retention
from tierkv.testing.payloads import payload_of

BLOCKS = 6
"""The longest prompt, in blocks."""
PROMPTS = (64, 32, 24, 32, 32)
"""How many prompts there are in each namespace: more than all tiers but the server hold."""
ENGINE_PAGES = 8
RETENTIONS = (Retention(), Retention(priority=1), Retention(ttl_s=0.2), Retention(coldest="host"))
RETENTION_WEIGHTS = (90, 4, 3, 3)

Bytes = NDArray[np.uint8]


class WrongBytes(Exception):
    """What no store may ever do."""


class Library:
    """All prompts and all bytes, made once: a soak shall spend its time in the store."""

    def __init__(self, spaces: Sequence[OpenNamespace]) -> None:
        self.chains: list[list[list[Chain]]] = []
        """By namespace, prompt and length - 1."""
        self._payloads: dict[tuple[bytes, int], Bytes] = {}
        for space, prompts in zip(spaces, PROMPTS, strict=True):
            self.chains.append([self._prompt(space, number) for number in range(prompts)])

    def _prompt(self, space: OpenNamespace, number: int) -> list[Chain]:
        tokens = np.arange(BLOCKS * BLOCK_TOKENS + 1, dtype=np.int32) + 1_000_000 * (number + 1)
        chains = [space.chain(tokens[: length * BLOCK_TOKENS + 1]) for length in range(1, BLOCKS + 1)]
        for block_hash in chains[-1].hashes:
            for part in space.namespace.layout.parts:
                key = space.namespace.block_key(block_hash, part.index)
                payload = np.frombuffer(payload_of(key, part.payload_bytes), np.uint8)
                self._payloads[block_hash, part.index] = payload
        return chains

    def payload(self, chain: Chain, position: int, part: int) -> Bytes:
        return self._payloads[chain.hashes[position], part]

    def payloads(self, chain: Chain) -> list[list[Bytes]]:
        """As ``put`` takes them."""
        parts = chain.namespace.layout.parts
        return [[self.payload(chain, i, part.index) for part in parts] for i in range(len(chain))]


class Worker:
    """Calls ``step`` again and again in one thread."""

    def __init__(self, rig: Rig, library: Library, control: Control, seed: int, number: int) -> None:
        self._rig = rig
        self._client = rig.client
        self._library = library
        self._control = control
        self._dice = random.Random(f"{seed} worker {number}")
        self._memory = np.zeros((ENGINE_PAGES, 4096), np.uint8)
        self._kv = PagedKV(((LayerPages((self._memory,)),),))
        self.waits: defaultdict[str, Waits] = defaultdict(Waits)
        self.done = 0
        self.verified_blocks = 0
        self.errors: list[str] = []
        self._verbs = [
            (40, self._load),
            (22, self._put),
            (14, self._match),
            (8, self._prefetch),
            (4, self._offload_and_onboard),
            (4, self._pin),
            (3, self._cancelled_load),
            (2, self._reserve),
            (1.6, self._evict),
            (0.8, self._clear),
            (0.6, self._flush),
        ]
        self._weights = [weight for weight, _ in self._verbs]

    def step(self) -> None:
        """One verb. Raises ``WrongBytes``."""
        [(_, verb)] = self._dice.choices(self._verbs, self._weights)
        verb()
        self.done += 1

    def _chain(self, space: int | None = None) -> Chain:
        """A few prompts are asked for most of the time."""
        dice = self._dice
        prompts = self._library.chains[dice.randrange(len(PROMPTS)) if space is None else space]
        number = dice.randrange(len(prompts)) if dice.random() < 0.4 else dice.randrange(len(prompts) // 4)
        return prompts[number][dice.randrange(BLOCKS)]

    def _timeout_s(self) -> float:
        return self._dice.choice((0.0, 0.01, 0.05, 0.2, 0.5))

    # -- finding --------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        chain, timeout_s = self._chain(), self._timeout_s()
        start_s = time.monotonic()
        lease = self._client.load(chain, timeout_s=timeout_s)
        self.waits["load"].note(start_s, timeout_s, self._control)
        with lease:
            self._check(lease)
            if self._dice.random() < 0.1:
                time.sleep(0.001)  # others write meanwhile; what is leased must not change
                self._check(lease)

    def _check(self, lease: Lease) -> None:
        chain, slot_of = lease.chain, self._rig.store.catalog.slot_of
        for i in range(len(lease)):
            for part in chain.namespace.layout.parts:
                if slot_of(lease.families[i], part.index) == NO_SLOT:
                    continue
                found = np.frombuffer(lease.view(i, part.index), np.uint8)
                if not np.array_equal(found, self._library.payload(chain, i, part.index)):
                    raise WrongBytes(f"block {i}, part {part.index} of {chain.hashes[i].hex()}")
                self.verified_blocks += 1

    def _match(self) -> None:
        chain = self._chain()
        start_s = time.monotonic()
        match = self._client.match(chain)
        self.waits["match"].note(start_s, None, self._control)
        if not 0 <= match.blocks <= len(chain) or match.tokens >= chain.num_tokens:
            raise WrongBytes(f"{match.blocks} blocks and {match.tokens} tokens of {len(chain)} were matched")

    def _prefetch(self) -> None:
        timeout_s = self._timeout_s()
        start_s = time.monotonic()
        self._client.prefetch(self._chain(), timeout_s=timeout_s).result()
        self.waits["prefetch"].note(start_s, timeout_s, self._control)

    def _cancelled_load(self) -> None:
        future = self._client.load_async(self._chain(), timeout_s=self._timeout_s())
        if not future.cancel():
            try:
                future.result().release()
            except CancelledError:
                pass

    def _pin(self) -> None:
        chain, timeout_s = self._chain(), self._timeout_s()
        start_s = time.monotonic()
        self._client.pin(chain, timeout_s=timeout_s)
        self.waits["pin"].note(start_s, timeout_s, self._control)
        self._client.unpin(chain)

    # -- storing --------------------------------------------------------------------------------------------------

    def _put(self) -> None:
        chain = self._chain()
        payloads = self._library.payloads(chain)
        retention = self._dice.choices(RETENTIONS, RETENTION_WEIGHTS)[0]
        start_s = time.monotonic()
        self._client.put(chain, payloads, retention=retention)
        self.waits["put"].note(start_s, None, self._control)

    def _reserve(self) -> None:
        """A draft that comes to nothing."""
        draft = self._client.reserve(self._chain())
        if draft is not None:
            draft.drop()

    def _offload_and_onboard(self) -> None:
        """From the pages of an engine, and back into others."""
        chain = self._chain(space=0)
        pages = [[[page]] for page in range(len(chain))]
        for i in range(len(chain)):
            self._memory[i] = self._library.payload(chain, i, 0)
        start_s = time.monotonic()
        self._client.offload(self._kv, pages, chain).result()
        self.waits["offload"].note(start_s, None, self._control)
        with self._client.load(chain, timeout_s=0.05) as lease:
            self._memory[:] = 0xAA
            back = [[[ENGINE_PAGES - 1 - i]] for i in range(len(lease))]
            if not self._client.onboard(lease, self._kv, back).result():
                raise WrongBytes("an onboard of leased blocks failed")
            for i in range(len(lease)):
                found = self._memory[ENGINE_PAGES - 1 - i]
                if not np.array_equal(found, self._library.payload(chain, i, 0)):
                    raise WrongBytes(f"page of block {i} of {chain.hashes[i].hex()} after onboard")
                self.verified_blocks += 1

    # -- taking out -----------------------------------------------------------------------------------------------

    def _evict(self) -> None:
        tier = self._dice.choice(("host", "nvme", "valkey"))
        space = self._dice.choice(self._rig.spaces)
        start_s = time.monotonic()
        self._client.evict(tier, namespace=space)
        self.waits[f"evict {tier}"].note(start_s, None, self._control)

    def _clear(self) -> None:
        start_s = time.monotonic()
        self._client.clear(namespace=self._rig.cleared, timeout_s=0.3).result()
        self.waits["clear"].note(start_s, 0.3, self._control)

    def _flush(self) -> None:
        start_s = time.monotonic()
        self._client.flush(self._dice.choice(("nvme", "valkey")), timeout_s=0.1).result()
        self.waits["flush"].note(start_s, 0.1, self._control)
