"""vLLM's KV cache events of what tierkv holds, for routers that send a prompt where its blocks are.

``BlockStored`` (medium ``CPU``) when a save is over on every rank, ``BlockRemoved`` when a block can no longer be had
from any tier. Only where vLLM has events on (``--kv-events-config``).
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tierkv.daemon.remote import RemoteClient
from tierkv.engines.vllm_messages import SaveJob
from tierkv.errors import ClosedError, TierKVError
from tierkv.ids import BlockHash

if TYPE_CHECKING:
    from vllm.v1.request import Request

MOST_KNOWN: Final = 262_144
"""Blocks whose removal can be told; of older ones it is not."""
POLL_S: Final = 2.0
REST_S: Final = 1.0
MEDIUM: Final = "CPU"


class _Begun(NamedTuple):
    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]
    lora: Any
    plain: bool
    """The store knows the blocks by the engine's own hashes."""


class KvEvents:
    """``began``, ``ended`` and ``take`` are for the scheduler's thread; another one hears what the store removes."""

    def __init__(self, client: RemoteClient, hash_tokens: int, engine_blocks: int) -> None:
        self._client = client
        self._hash_tokens = hash_tokens
        self._engine_blocks = engine_blocks
        self._begun: dict[int, _Begun] = {}
        self._lock = threading.Lock()
        self._known: OrderedDict[BlockHash, list[bytes]] = OrderedDict()
        self._events: deque[Any] = deque(maxlen=MOST_KNOWN)
        self._over = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="tierkv-vllm-events", daemon=True)
        self._listener.start()

    def began(self, job: SaveJob, request: Request) -> None:
        first, last = job.first * self._engine_blocks, (job.first + len(job.pages)) * self._engine_blocks
        self._begun[job.number] = _Begun(
            list(request.block_hashes[first:last]),
            request.block_hashes[first - 1] if first else None,
            list(request.all_token_ids[first * self._hash_tokens : last * self._hash_tokens]),
            request.lora_request,
            job.prompt.extras.is_empty(),
        )

    def ended(self, number: int, *, whole: bool) -> None:
        """``whole``: all of its blocks are in the store."""
        begun = self._begun.pop(number, None)
        if begun is None or not whole:
            return
        from vllm.distributed.kv_events import BlockStored
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as said

        if begun.plain:
            with self._lock:
                self._note(begun.hashes)
        self._events.append(
            BlockStored(
                block_hashes=[said(one) for one in begun.hashes],
                parent_block_hash=None if begun.parent is None else said(begun.parent),
                token_ids=begun.tokens,
                block_size=self._hash_tokens,
                lora_id=None if begun.lora is None else begun.lora.lora_int_id,
                medium=MEDIUM,
                lora_name=None if begun.lora is None else begun.lora.lora_name,
            )
        )

    def _note(self, hashes: list[bytes]) -> None:
        for at in range(0, len(hashes), self._engine_blocks):
            block = hashes[at : at + self._engine_blocks]
            self._known[BlockHash(block[-1])] = block
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def take(self) -> Iterable[Any]:
        """All since the last call."""
        found = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def _listen(self) -> None:
        after = 0
        while not self._over.is_set():
            try:
                heard = self._client.events(after, timeout_s=POLL_S)
            except ClosedError:
                return
            except TierKVError:  # away: another daemon counts from 1 again
                after = 0
                self._over.wait(REST_S)
                continue
            for event in heard:
                after = event.seq
                if event.kind == "removed" and event.block_hash is not None:
                    self._removed(event.block_hash)

    def _removed(self, block: BlockHash) -> None:
        from vllm.distributed.kv_events import BlockRemoved
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as said

        with self._lock:
            hashes = self._known.pop(block, None)
        if hashes is not None:
            self._events.append(BlockRemoved(block_hashes=[said(one) for one in hashes], medium=MEDIUM))

    def close(self) -> None:
        self._over.set()
