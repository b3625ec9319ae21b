"""The limits do the work that they claim to, on tiny sizes."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import xxhash

from bench import edges
from bench.harness import Settings
from bench.limit_chain import bare_chain, bare_chain_joined
from bench.limit_copy import checksum_cpu_us_per_mib, copy_and_checksum
from bench.limit_fio import find_fio
from bench.limit_pool import BarePool
from bench.limit_valkey import BareClient
from bench.memory import Blocks, require_equal
from bench.names import chain_of, header_for, keys_of, namespace_for
from bench.valkey_server import running_server
from tierkv import frame

BLOCK_BYTES = 64 * 1024


def test_blocks_are_aligned_and_hold_their_patterns() -> None:
    blocks = Blocks(3, BLOCK_BYTES, seed=5)
    assert [array.ctypes.data % 4096 for array in blocks.arrays] == [0, 0, 0]
    require_equal(blocks.views[2], blocks.pattern(2), "block 2")
    blocks.poison()
    with pytest.raises(RuntimeError, match="block 2: the bytes differ"):
        require_equal(blocks.views[2], blocks.pattern(2), "block 2")


def test_copy_limit_copies() -> None:
    sources, targets = Blocks(3, BLOCK_BYTES), Blocks(3, BLOCK_BYTES, seed=9)
    assert copy_and_checksum(targets, sources)["mib_per_s"] > 0
    assert checksum_cpu_us_per_mib(targets) > 0
    for i in range(3):
        require_equal(targets.views[i], sources.pattern(i), f"block {i}")


def test_chain_limit_is_the_chain_of_the_store() -> None:
    namespace = namespace_for(BLOCK_BYTES)
    tokens = np.arange(16 * 5 + 3, dtype=np.int32)
    wanted = list(namespace.chain(tokens).hashes)
    assert len(wanted) == 5
    assert bare_chain(tokens, 16, namespace.root) == wanted
    assert bare_chain_joined(tokens, 16, namespace.root) == wanted
    assert wanted[0] == hashlib.sha256(namespace.root + tokens[:16].tobytes()).digest()


def test_headers_prove_their_blocks() -> None:
    chain = chain_of(namespace_for(BLOCK_BYTES), 2)
    keys, blocks = keys_of(chain), Blocks(2, BLOCK_BYTES)
    header = header_for(chain, 1, keys[1], BLOCK_BYTES, xxhash.xxh3_64_intdigest(blocks.views[1]))
    assert frame.unpack(frame.pack(header)) == header
    frame.verify(header, keys[1], blocks.views[1])


def test_bare_valkey_client_stores_and_gets_back_what_the_store_would_see() -> None:
    blocks, back, headers = Blocks(3, BLOCK_BYTES), Blocks(3, BLOCK_BYTES), Blocks(3, 4096)
    keys = [b"key:%d" % i for i in range(3)]
    with running_server() as server:
        for transport in ("tcp", "unix"):
            back.poison()
            with server.connect(transport) as connection:
                client = BareClient(connection, BLOCK_BYTES)
                client.set(keys, headers.views, blocks.views)
                client.get(keys, back.views)
                connection.sendall(b"GETRANGE " + keys[0] + b" 0 511\r\n")
                assert connection.recv(8192).endswith(bytes(headers.views[0][:512]) + b"\r\n")
            for i in range(3):
                require_equal(back.views[i], blocks.pattern(i), f"block {i} over {transport}")


def test_disk_limits_move_whole_blocks(tmp_path: Path) -> None:
    blocks, path = Blocks(4, BLOCK_BYTES), tmp_path / "file"
    path.write_bytes(b"".join(blocks.views) * 4)
    pool = BarePool(path, BLOCK_BYTES, 16, blocks.views)
    try:
        assert pool.run("write", 16)["mib_per_s"] > 0
        found = {path.read_bytes()[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in range(16)}
        assert found == {bytes(blocks.pattern(i)) for i in range(4)}
        blocks.poison()
        assert pool.run("read", 16)["cpu_us_per_mib"] > 0
        assert {bytes(view) for view in blocks.views} <= found
    finally:
        pool.close()
    fio = find_fio(path, BLOCK_BYTES, 16)
    if fio is not None:
        assert fio.run("read", 8)["mib_per_s"] > 0


def test_edges_writes_json_of_the_chosen_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "edges.json"
    assert (
        edges.BENCH.main(["--quick", "--only", "keys_chain", "--json", str(path), "--dir", str(tmp_path)])
        == 0
    )
    rows = json.loads(path.read_text())
    assert list(rows) == ["keys_chain"]
    assert rows["keys_chain"]["ratio"] == pytest.approx(
        rows["keys_chain"]["value"] / rows["keys_chain"]["limit"]
    )
    assert rows["keys_chain"]["rounds"] == 3
    printed = capsys.readouterr()
    assert "keys_chain" in printed.out
    assert "round 3 of 3" in printed.err
    assert edges.BENCH.main(["--only", "nothing of that name"]) == 2


def test_twelve_rounds_of_one_mib_blocks_are_the_default() -> None:
    settings = Settings(Path())
    assert (settings.rounds, settings.block_bytes, settings.batch_blocks) == (12, 2**20, 64)
    assert settings.chain_tokens == 131_072
