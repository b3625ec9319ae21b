"""What vLLM tells of the store's blocks: each change once, of blocks under this engine's names alone."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.client_support import spec_of
from tests.stand_in_vllm import worker_modules
from tests.valkey_server import eventually
from tierkv.errors import Away
from tierkv.ids import BlockHash
from tierkv.keys import Extras, Namespace

modules = worker_modules()
SIZE = 16
SPEC = spec_of()
OTHER = spec_of(weights_epoch=1)


class Daemon:
    """Tells what it is given, and is another one after ``dies``."""

    def __init__(self) -> None:
        self.link = SimpleNamespace(memory=SimpleNamespace(instance=b"1"))
        self.log: list[Any] = []
        self._changed = threading.Condition()
        self._gone = False

    def events(self, after: int, *, timeout_s: float) -> list[Any]:
        with self._changed:
            self._changed.wait_for(lambda: self._gone or self._since(after), timeout_s)
            if self._gone:
                self._gone = False
                raise Away("it does not answer")
            return self._since(after)

    def _since(self, after: int) -> list[Any]:
        return [event for event in self.log if event.seq > after]

    def tell(self, kind: str, block: bytes, spec: Any = SPEC, *, left_out: int = 0) -> None:
        with self._changed:
            seq = (self.log[-1].seq if self.log else 0) + 1 + left_out
            space = Namespace(spec).digest
            self.log.append(SimpleNamespace(seq=seq, kind=kind, namespace=space, block_hash=BlockHash(block)))
            self._changed.notify_all()

    def is_away(self, *, dies: bool) -> None:
        with self._changed:
            if dies:
                self.link.memory = SimpleNamespace(instance=b"2")
                self.log = []
            self._gone = True
            self._changed.notify_all()


class Told(SimpleNamespace):
    @property
    def blocks(self) -> list[bytes]:
        found: list[bytes] = self.block_hashes
        return found


class Stored(Told):
    pass


class Removed(Told):
    pass


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Daemon, Any]]:
    events, utils = (
        ModuleType("vllm.distributed.kv_events"),
        ModuleType("vllm.v1.core.kv_cache_utils"),
    )
    vars(events).update(BlockStored=Stored, BlockRemoved=Removed)
    vars(utils).update(maybe_convert_block_hash=lambda block: block)
    for name in ("vllm", "vllm.distributed", "vllm.v1", "vllm.v1.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (events, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(modules["vllm_events"], "POLL_S", 0.05)
    monkeypatch.setattr(modules["vllm_events"], "REST_S", 0.01)
    daemon = Daemon()
    told = modules["vllm_events"].KvEvents(daemon, SIZE, 1)
    yield daemon, told
    told.close()
    told._listener.join(20)
    assert not told._listener.is_alive()


def save(told: Any, blocks: list[bytes], first: int = 0, number: int = 1) -> None:
    """Of the prompt ``blocks``, from its block ``first`` on."""
    prompt = SimpleNamespace(spec=SPEC, extras=Extras())
    job = SimpleNamespace(number=number, first=first, pages=blocks[first:], prompt=prompt)
    tokens = list(range(SIZE * len(blocks)))
    told.began(job, SimpleNamespace(block_hashes=blocks, all_token_ids=tokens, lora_request=None))
    told.ended(number, whole=True)


def hears(told: Any, count: int) -> list[Any]:
    """So many events."""
    found: deque[Any] = deque()

    def all_there() -> bool:
        found.extend(told.take())
        return len(found) >= count

    eventually(all_there, f"{count} events")
    assert len(found) == count
    return list(found)


A, B, C, D = (bytes([letter]) * 32 for letter in b"abcd")


def test_d28_a_block_that_is_there_already_is_not_told_again(rig: tuple[Daemon, Any]) -> None:
    _, told = rig
    save(told, [A, B])
    [event] = hears(told, 1)
    assert (event.blocks, event.parent_block_hash) == ([A, B], None)
    assert event.token_ids == list(range(2 * SIZE))
    save(told, [A, B, C, D])
    [event] = hears(told, 1)
    assert (event.blocks, event.parent_block_hash) == ([C, D], B)
    assert event.token_ids == list(range(2 * SIZE, 4 * SIZE))
    save(told, [A, B, C, D], first=1)
    assert not told.take()


def test_d28_a_block_that_came_back_is_told_with_its_parent(rig: tuple[Daemon, Any]) -> None:
    daemon, told = rig
    save(told, [A, B, C])
    hears(told, 1)
    daemon.tell("removed", B)
    [gone] = hears(told, 1)
    assert (type(gone), gone.blocks) == (Removed, [B])
    save(told, [A, B, C])
    [event] = hears(told, 1)
    assert (event.blocks, event.parent_block_hash) == ([B], A)
    assert event.token_ids == list(range(SIZE, 2 * SIZE))


def test_d28_a_block_of_the_same_tokens_under_another_name_is_none_of_ours(rig: tuple[Daemon, Any]) -> None:
    """Of other weights, or of another tenant: the engine's hash of it is the same."""
    daemon, told = rig
    save(told, [A, B])
    hears(told, 1)
    daemon.tell("removed", A, OTHER)
    daemon.tell("removed", B)
    assert [event.blocks for event in hears(told, 1)] == [[B]]


def test_d28_what_a_daemon_said_before_it_was_away_is_not_told_again(rig: tuple[Daemon, Any]) -> None:
    daemon, told = rig
    save(told, [A])
    daemon.tell("removed", A)
    hears(told, 2)
    save(told, [A])
    hears(told, 1)
    daemon.is_away(dies=False)
    daemon.tell("stored", B)
    daemon.tell("removed", B)
    eventually(lambda: not daemon._gone, "it was asked again")
    save(told, [C])
    daemon.tell("removed", C)
    assert [event.blocks for event in hears(told, 2)] == [[C], [C]]


@pytest.mark.parametrize("why", ["it died", "it forgot"])
def test_d28_what_nobody_can_vouch_for_is_told_to_be_gone(rig: tuple[Daemon, Any], why: str) -> None:
    daemon, told = rig
    save(told, [A, B])
    daemon.tell("stored", A)
    hears(told, 1)
    eventually(lambda: told.heard == 1, "the first is heard")
    if why == "it died":
        daemon.is_away(dies=True)
        daemon.tell("stored", C)
    else:
        daemon.tell("stored", C, left_out=3)
    gone = hears(told, 2)
    assert {type(event) for event in gone} == {Removed}
    assert sorted(block for event in gone for block in event.blocks) == [A, B]
    save(told, [A, B])
    assert [event.blocks for event in hears(told, 1)] == [[A, B]]
