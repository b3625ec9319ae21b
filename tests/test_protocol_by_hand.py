"""The protocol as ``docs/daemon.md`` tells it: a client of sockets, msgpack and mmap alone stores and loads."""

from __future__ import annotations

import array
import json
import mmap
import re
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash

import tierkv
from tests.daemon_process import PATIENCE_S, running_daemon
from tierkv.daemon.verbs import ONE_WAY, VERBS

PAGE = Path(__file__).parent.parent / "docs" / "daemon.md"
TOKENS = 100
BLOCKS = 6
BLOCK_BYTES = 4 * 16384


def protocol() -> str:
    return PAGE.read_text().split("## The protocol")[1]


class ByHand:
    """Of the page, and of nothing else."""

    def __init__(self, path: Path, undo: ExitStack) -> None:
        self.sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(str(path))
        self.send("hello", version=1, session=secrets.token_bytes(16), owner="by hand")
        first, fds, _, _ = socket.recv_fds(self.sock, 4, 2)
        facts = self.receive(first)
        self.regions, self.region_bytes = facts["regions"], facts["region_bytes"]
        self.slots_per_region = facts["slots_per_region"]
        with open(fds[0], "r+b") as arena, open(fds[1], "rb") as table:
            self.arena = undo.enter_context(
                closing(mmap.mmap(arena.fileno(), self.regions * self.region_bytes))
            )
            size = 4 * self.regions * (1 + self.slots_per_region)
            self.table = undo.enter_context(closing(mmap.mmap(table.fileno(), size, prot=mmap.PROT_READ)))

    def send(self, verb: str, **words: Any) -> None:
        body = msgpack.packb([verb, words])
        self.sock.sendall(struct.pack("<I", len(body)) + body)

    def receive(self, first: bytes = b"") -> Any:
        (size,) = struct.unpack("<I", first + self.exactly(4 - len(first)))
        kind, *rest = msgpack.unpackb(self.exactly(size))
        assert kind == "ok", rest
        return rest[0]

    def exactly(self, size: int) -> bytes:
        return self.sock.recv(size, socket.MSG_WAITALL) if size else b""

    def ask(self, verb: str, **words: Any) -> Any:
        self.send(verb, **words)
        return self.receive()

    def start_of(self, slot: int) -> int:
        region, position = divmod(slot, self.slots_per_region)
        (pages,) = struct.unpack_from("<I", self.table, 4 * region)
        return region * self.region_bytes + position * int(pages) * 4096

    def generation(self, slot: int) -> int:
        return int(struct.unpack_from("<I", self.table, 4 * (self.regions + slot))[0])


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    with running_daemon(tmp_path) as daemon:
        yield daemon.socket


def numbers(kind: str, blob: bytes) -> list[int]:
    found = array.array(kind)
    found.frombytes(blob)
    return found.tolist()


def spec_of_the_page() -> dict[str, Any]:
    (text,) = re.findall(r"```json\n(.*?)```", protocol(), re.DOTALL)
    spec: dict[str, Any] = json.loads(text)
    return spec


def test_a_client_by_hand_stores_and_loads_what_the_library_stores_and_loads(path: Path) -> None:
    group = tierkv.LayerGroup(
        "all", tierkv.GroupKind.FULL, layers=4, page_bytes=16384, engine_block_tokens=16
    )
    layout = tierkv.Layout("my-pages", "float16", hash_tokens=16, groups=(group,))
    spec = tierkv.NamespaceSpec(weights=tierkv.Weights("revision", "v1"), layout=layout, engine="my-engine")
    with ExitStack() as undo:
        library = undo.enter_context(tierkv.connect(f"unix://{path}"))
        chain = library.open_namespace(spec).chain(np.arange(TOKENS))
        hand = ByHand(path, undo)
        opened = hand.ask("open", spec=spec_of_the_page())
        assert opened == {"namespace": chain.namespace.digest, "ranks": [0]}
        said = {"namespace": opened["namespace"], "hashes": b"".join(chain.hashes), "tokens": TOKENS}

        assert library.put(chain, [np.full(BLOCK_BYTES, 7, np.uint8)]).stored == 1
        reserved = hand.ask("reserve", **said, draft=1, first=0, count=BLOCKS)
        assert (reserved["result"]["resident"], reserved["parts"]) == (1, [0])
        positions, slots = numbers("i", reserved["positions"]), numbers("i", reserved["slots"])
        assert positions == [1, 2, 3, 4, 5]
        sums = b""
        for position, slot in zip(positions, slots, strict=True):
            payload, start = bytes([position]) * BLOCK_BYTES, hand.start_of(slot)
            hand.arena[start : start + BLOCK_BYTES] = payload
            sums += struct.pack("<Q", xxhash.xxh3_64_intdigest(payload))
        assert hand.ask("commit", **said, draft=1, sums=sums)["result"]["stored"] == 5

        with library.load(chain) as lease:
            assert [bytes(lease.view(block)) for block in range(1, len(lease))] == [
                bytes([block]) * BLOCK_BYTES for block in range(1, BLOCKS)
            ]
        loaded = hand.ask("load", **said, lease=2)
        assert loaded["blocks"] == BLOCKS
        slots, generations = numbers("i", loaded["slots"]), numbers("I", loaded["generations"])
        for slot, generation, byte in zip(slots, generations, [7, 1, 2, 3, 4, 5], strict=True):
            start = hand.start_of(slot)
            assert hand.arena[start : start + BLOCK_BYTES] == bytes([byte]) * BLOCK_BYTES
            assert hand.generation(slot) == generation
        hand.send("release", lease=2)
        assert hand.ask("ping") == {}, "nothing else came before it"
        assert hand.ask("reserve", **said, draft=3, first=0, count=BLOCKS).keys() == {"result"}
        assert hand.ask("bye") == {}


def test_the_page_has_every_verb_and_says_which_have_no_reply() -> None:
    rows = dict(re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|.*\| (.+) \|$", protocol(), re.MULTILINE))
    named = {verb for row in rows for verb in re.findall(r"\w+", row)}
    assert set(VERBS) - named == set()
    silent = re.search(r"((?:`\w+`,? (?:and )?)+)have \*no message\*", protocol())
    assert silent is not None
    assert set(re.findall(r"`(\w+)`", silent[1])) == ONE_WAY
