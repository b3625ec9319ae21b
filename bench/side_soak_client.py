"""One engine of a sidecar soak, in a process of its own: every verb in random order, every byte compared, all counted.

Run by ``bench.sidecar_soak``: prints how many operations it has done, a line every now and then, and at the end what it
has counted, as JSON.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter, deque
from dataclasses import replace
from typing import Final

import numpy as np

from bench.soak_rig import specs
from bench.soak_work import BLOCKS, PROMPTS, RETENTION_WEIGHTS, RETENTIONS, Library, WrongBytes
from tierkv.daemon.remote import RemoteClient
from tierkv.daemon.tenant import Tenant
from tierkv.handles import Lease
from tierkv.index import NO_SLOT
from tierkv.intake import Stored
from tierkv.keys import Chain
from tierkv.testing.threads import Keeper

PATIENCE_S: Final = 120.0
"""No call is given up before: what the daemon did and nobody heard of could not be counted."""
TENANTS: Final = 3
MOST_HELD: Final = 4
TELL_EVERY: Final = 250


class PatientClient(RemoteClient):
    """Waits for every answer."""

    def _by_s(self, timeout_s: float | None) -> float:
        return time.monotonic() + PATIENCE_S


class Engine:
    """Calls ``step`` again and again in one thread. ``counted`` has the names of the daemon's counters."""

    def __init__(self, path: str, number: int, seed: int) -> None:
        self._path, self._number = path, number
        self._dice = random.Random(f"{seed} engine {number}")
        self.counted: Counter[str] = Counter()
        self.done = 0
        self.verified_blocks = 0
        self.sessions = 0
        self.away = 0
        """Times that a block was not stored since the daemon could not be reached in time."""
        self._held: deque[Lease] = deque()
        self._join()
        self._verbs = [
            (36, self._load),
            (10, self._hold),
            (26, self._put),
            (12, self._match),
            (8, self._prefetch),
            (4, self._reserve),
            (1.5, self._evict),
            (0.8, self._clear),
            (0.5, self._flush),
            (0.3, self._leave_and_come_back),
        ]
        self._weights = [weight for weight, _ in self._verbs]

    def _join(self) -> None:
        """As a new session. Engines of one tenant share their blocks."""
        salt = f"tenant {self._number % TENANTS}"
        client = PatientClient(
            self._path, owner=f"engine {self._number}", call_s=PATIENCE_S, tenant=Tenant(salt)
        )
        self._client = client
        cleared = replace(specs()[0], engine="cleared")
        spaces = [client.open_namespace(spec) for spec in [*specs(), cleared]]
        self._cleared = spaces[-1]
        if not self.sessions:
            self._library = Library(spaces)
        self.sessions += 1

    def step(self) -> None:
        """One verb. Raises ``WrongBytes``."""
        [(_, verb)] = self._dice.choices(self._verbs, self._weights)
        verb()
        self.done += 1

    def close(self) -> None:
        """With what it holds: the daemon takes that back."""
        for lease in self._held:
            self._check(lease)
        self.leave()
        if self._client.link.reconnects:
            raise WrongBytes(f"the daemon was lost {self._client.link.reconnects} times")

    def leave(self) -> None:
        self._client.close()
        self._held.clear()

    def _chain(self) -> Chain:
        """A few prompts are asked for most of the time."""
        dice = self._dice
        prompts = self._library.chains[dice.randrange(len(PROMPTS))]
        number = dice.randrange(len(prompts)) if dice.random() < 0.4 else dice.randrange(len(prompts) // 4)
        return prompts[number][dice.randrange(BLOCKS)]

    # -- finding --------------------------------------------------------------------------------------------------

    def _leased(self) -> Lease:
        lease = self._client.load(self._chain(), timeout_s=self._dice.choice((0.0, 0.01, 0.05, 0.2)))
        self.counted["leased_blocks_total"] += len(lease)
        self.counted["hit_blocks_total"] += len(lease)
        return lease

    def _load(self) -> None:
        with self._leased() as lease:
            self._check(lease)

    def _hold(self) -> None:
        """Looks again at what was leased a while ago: others have stored much since."""
        self._held.append(self._leased())
        if len(self._held) > MOST_HELD:
            with self._held.popleft() as lease:
                self._check(lease)

    def _check(self, lease: Lease) -> None:
        chain, lessor = lease.chain, lease.lessor
        for i in range(len(lease)):
            for part in chain.namespace.layout.parts:
                assert lessor is not None
                if lessor.slot_of(lease.families[i], part.index) == NO_SLOT:
                    continue
                found = np.frombuffer(lease.view(i, part.index), np.uint8)
                if not np.array_equal(found, self._library.payload(chain, i, part.index)):
                    raise WrongBytes(f"block {i}, part {part.index} of {chain.hashes[i].hex()}")
                self.verified_blocks += 1

    def _match(self) -> None:
        self._count_match(self._client.match(self._chain()).blocks)

    def _prefetch(self) -> None:
        timeout_s = self._dice.choice((0.0, 0.05, 0.2))
        self._count_match(self._client.prefetch(self._chain(), timeout_s=timeout_s).result(PATIENCE_S).blocks)

    def _count_match(self, blocks: int) -> None:
        self.counted["match_total"] += 1
        self.counted["match_blocks_total"] += blocks

    # -- storing --------------------------------------------------------------------------------------------------

    def _put(self) -> None:
        chain = self._chain()
        retention = self._dice.choices(RETENTIONS, RETENTION_WEIGHTS)[0]
        stored = self._client.put(chain, self._library.payloads(chain), retention=retention)
        if stored.stored + stored.resident + sum(stored.dropped.values()) != len(chain):
            raise WrongBytes(f"of {len(chain)} blocks became {stored}")
        part_bytes = sum(part.payload_bytes for part in chain.namespace.layout.parts)
        self.counted["stored_blocks_total/host"] += stored.stored
        self.counted["stored_bytes_total/host"] += stored.stored * part_bytes
        self._count_dropped(stored)

    def _reserve(self) -> None:
        """A draft that comes to nothing."""
        result = Stored()
        draft = self._client.reserve(self._chain(), result=result)
        if draft is not None:
            draft.drop()
        self._count_dropped(result)

    def _count_dropped(self, stored: Stored) -> None:
        for reason, count in stored.dropped.items():
            if reason == "no_daemon":
                # A new connection has a short deadline of its own: the daemon has not heard of this.
                self.away += 1
            else:
                self.counted[f"dropped_blocks_total/host/{reason}"] += count

    # -- taking out -----------------------------------------------------------------------------------------------

    def _evict(self) -> None:
        self._client.evict(self._dice.choice(("host", "nvme")), namespace=self._cleared)

    def _clear(self) -> None:
        self._client.clear(namespace=self._cleared, timeout_s=1.0).result(PATIENCE_S)

    def _flush(self) -> None:
        self._client.flush("nvme", timeout_s=0.1).result(PATIENCE_S)

    def _leave_and_come_back(self) -> None:
        self.close()
        self._join()


def run(path: str, number: int, operations: int, seed: int) -> dict[str, object]:
    """What the engine has counted; ``problem`` when it broke off."""
    engine = Engine(path, number, seed)
    keeper = Keeper()
    with keeper:
        while engine.done < operations:
            engine.step()
            if engine.done % TELL_EVERY == 0:
                print(engine.done, flush=True)
        engine.close()
    engine.leave()
    return {
        "done": engine.done,
        "verified_blocks": engine.verified_blocks,
        "sessions": engine.sessions,
        "away": engine.away,
        "counted": dict(engine.counted),
        "problem": None if keeper.error is None else repr(keeper.error),
    }


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], *map(int, sys.argv[2:]))), flush=True)
