"""vLLM's KV cache events of what tierkv holds, for routers that send a prompt where its blocks are.

``BlockStored`` (medium ``CPU``) when a save is over on every rank, ``BlockRemoved`` when a block can no longer be had
from any tier. Only where vLLM has events on (``--kv-events-config``).
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tierkv.daemon.remote import RemoteClient
from tierkv.engines.vllm_messages import SaveJob
from tierkv.errors import ClosedError, TierKVError
from tierkv.ids import BlockHash, NamespaceDigest
from tierkv.keys import Namespace

if TYPE_CHECKING:
    from vllm.v1.request import Request

MOST_KNOWN: Final = 262_144
"""Blocks whose removal can be told; of older ones it is not."""
POLL_S: Final = 2.0
REST_S: Final = 1.0
MEDIUM: Final = "CPU"


Name = tuple[NamespaceDigest, BlockHash]


class _Begun(NamedTuple):
    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]
    lora: Any
    names: list[Name] | None
    """The store's names of its blocks, where these are the engine's own hashes."""


class KvEvents:
    """``began``, ``ended`` and ``take`` are for the scheduler's thread; another one hears what the store removes."""

    def __init__(self, client: RemoteClient, hash_tokens: int, engine_blocks: int) -> None:
        self._client = client
        self._hash_tokens = hash_tokens
        self._engine_blocks = engine_blocks
        self._begun: dict[int, _Begun] = {}
        self._lock = threading.Lock()
        self._known: OrderedDict[Name, list[bytes]] = OrderedDict()
        """What was told to be there."""
        self._events: deque[Any] = deque(maxlen=MOST_KNOWN)
        self.heard = 0
        """The number of the last event that the daemon has told."""
        self._over = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="tierkv-vllm-events", daemon=True)
        self._listener.start()

    def began(self, job: SaveJob, request: Request) -> None:
        first, last = job.first * self._engine_blocks, (job.first + len(job.pages)) * self._engine_blocks
        hashes = list(request.block_hashes[first:last])
        names = None
        if job.prompt.extras.is_empty():
            space = Namespace(job.prompt.spec).digest
            names = [
                (space, BlockHash(one)) for one in hashes[self._engine_blocks - 1 :: self._engine_blocks]
            ]
        self._begun[job.number] = _Begun(
            hashes,
            request.block_hashes[first - 1] if first else None,
            list(request.all_token_ids[first * self._hash_tokens : last * self._hash_tokens]),
            request.lora_request,
            names,
        )

    def ended(self, number: int, *, whole: bool) -> None:
        """``whole``: all of its blocks are in the store."""
        begun = self._begun.pop(number, None)
        if begun is None or not whole:
            return
        for first, last in self._untold(begun):
            self._tell(begun, first, last)

    def _untold(self, begun: _Begun) -> Iterator[tuple[int, int]]:
        """Stretches of its engine blocks that were not there before, which are known from now on."""
        size, end = self._engine_blocks, len(begun.hashes)
        if begun.names is None:
            yield 0, end
            return
        at = 0
        for is_new, names in groupby(begun.names, self._note(begun)):
            first, at = at, at + size * len(list(names))
            if is_new:
                yield first, min(at, end)

    def _note(self, begun: _Begun) -> Callable[[Name], bool]:
        """Says of each name in turn whether it is new, and notes it."""
        at = iter(range(0, len(begun.hashes), self._engine_blocks))

        def is_new(name: Name) -> bool:
            first = next(at)
            with self._lock:
                if name in self._known:
                    return False
                self._known[name] = begun.hashes[first : first + self._engine_blocks]
                if len(self._known) > MOST_KNOWN:
                    self._known.popitem(last=False)
                return True

        return is_new

    def _tell(self, begun: _Begun, first: int, last: int) -> None:
        from vllm.distributed.kv_events import BlockStored
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as said

        parent = begun.hashes[first - 1] if first else begun.parent
        self._events.append(
            BlockStored(
                block_hashes=[said(one) for one in begun.hashes[first:last]],
                parent_block_hash=None if parent is None else said(parent),
                token_ids=begun.tokens[first * self._hash_tokens : last * self._hash_tokens],
                block_size=self._hash_tokens,
                lora_id=None if begun.lora is None else begun.lora.lora_int_id,
                medium=MEDIUM,
                lora_name=None if begun.lora is None else begun.lora.lora_name,
            )
        )

    def take(self) -> Iterable[Any]:
        """All since the last call."""
        found = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def _listen(self) -> None:
        """Another daemon counts its events from 1 again, and each forgets the oldest. Of what was missed nobody can say
        which blocks it concerned, so all are told to be gone."""
        instance: bytes | None = None
        while not self._over.is_set():
            try:
                found = self._client.events(self.heard, timeout_s=POLL_S)
            except ClosedError:
                return
            except TierKVError:  # away
                self._over.wait(REST_S)
                continue
            memory = self._client.link.memory
            if memory is not None and memory.instance != instance:
                if instance is not None:
                    self._all_removed()
                again, self.heard, instance = self.heard > 0, 0, memory.instance
                if again:
                    continue
            for event in found:
                if self.heard and event.seq != self.heard + 1:
                    self._all_removed()
                self.heard = event.seq
                if event.kind == "removed" and event.block_hash is not None:
                    self._removed((event.namespace, event.block_hash))

    def _removed(self, name: Name) -> None:
        with self._lock:
            hashes = self._known.pop(name, None)
        if hashes is not None:
            self._tell_removed(hashes)

    def _all_removed(self) -> None:
        with self._lock:
            gone = list(self._known.values())
            self._known.clear()
        for hashes in gone:
            self._tell_removed(hashes)

    def _tell_removed(self, hashes: list[bytes]) -> None:
        from vllm.distributed.kv_events import BlockRemoved
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as said

        self._events.append(BlockRemoved(block_hashes=[said(one) for one in hashes], medium=MEDIUM))

    def close(self) -> None:
        self._over.set()
