"""What is read as a trace and what is refused: a line that says what cannot be, a file that is no trace, a pipe."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from replay_support import TRACES, recorded

from tierkv import cli
from tierkv.replay.formats import read_trace
from tierkv.replay.traces import TraceError


def ours(**more: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 1024, "hash_ranges": [[0, 2]], **more}


def mooncake(**more: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [7, 8], **more}


def written(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


NAN, HUGE = float("nan"), 10**400
BAD: list[tuple[dict[str, Any], str]] = [
    (ours(hash_ranges=[[0, 10**12]]), "do not fit in its 1,024 tokens"),
    (ours(hash_ranges=[[0, 10**7]], input_length=10**10), "more than 1,048,576 blocks"),
    (ours(hash_ranges=[[-5, 2]]), "a block = -5"),
    (ours(hash_ranges=[[5, -2]]), "a count = -2"),
    (ours(hash_ranges=[[0, 0.5]]), "a count = 0.5"),
    (ours(hash_ranges=[[0]]), "not enough values"),
    (ours(input_length=1023), "do not fit in its 1,023 tokens"),
    (ours(input_length=-1), "input_length = -1"),
    (ours(input_length=HUGE), "input_length = 1000"),
    (ours(input_length=True), "input_length = True"),
    (ours(own_blocks=3), "own_blocks = 3 is no whole number from 0 to 2"),
    (ours(timestamp=NAN), "timestamp = nan"),
    (ours(timestamp=float("inf")), "timestamp = inf"),
    (ours(timestamp=HUGE), "timestamp = 1000"),
    (ours(timestamp="5"), "timestamp = '5'"),
    (ours(block_tokens=16), "block_tokens = 16, and None in the first line"),
    ({"timestamp": 0, "hash_ranges": []}, "it has no input_length"),
    (mooncake(), "it has no hash_ranges"),
]
BAD_MOONCAKE: list[tuple[dict[str, Any], str]] = [
    (mooncake(input_length=-600), "input_length = -600"),
    (mooncake(hash_ids="ab"), "hash_ids is no list"),
    (mooncake(hash_ids=[[0], [1]]), "hash_ids is no list of numbers or words"),
    (mooncake(hash_ids=[0.5, 1.5]), "hash_ids is no list of numbers or words"),
    (mooncake(hash_ids=list(range(9))), "9 blocks of 512 tokens do not fit in its 1,024 tokens"),
    (ours(), "it has no hash_ids"),
]


@pytest.mark.parametrize(
    ("good", "bad", "told"),
    [*((ours(), bad, told) for bad, told in BAD), *((mooncake(), bad, told) for bad, told in BAD_MOONCAKE)],
)
def test_a_line_that_cannot_be_is_named(
    tmp_path: Path, good: dict[str, Any], bad: dict[str, Any], told: str
) -> None:
    with pytest.raises(TraceError) as error:
        read_trace(written(tmp_path, good, good, bad))
    assert "trace.jsonl: line 3 cannot be used: " in str(error.value)
    assert told in str(error.value)


CONV = gzip.compress((json.dumps(ours()) + "\n").encode() * 500, mtime=0)
"""Without the time, or each worker would name the test otherwise."""


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", "it is empty"),
        (b"\n \n", "it is empty"),
        (b"\x80\xfe\x00", "no text in UTF-8"),
        (json.dumps(ours()).encode("utf-16"), "no text in UTF-8"),
        (CONV[: len(CONV) // 2], "it is cut off; what is there comes out of gzip -dc"),
        (b"[" * 200_000, "line 1 is no JSON"),
        (b'{"a":' * 200_000, "line 1 is no JSON"),
        (json.dumps(ours()).encode() + b'\n{"timestamp": 4, "inp', "line 2 is no JSON"),
        (json.dumps([ours(), ours()]).encode(), "jq -c '.[]'"),
        (b"5\n", "no known format"),
        (b"[]\n", "no known format"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, raw: bytes, told: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(raw)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert told in str(error.value)
    assert str(path) in str(error.value)


def test_a_byte_order_mark_and_ends_of_lines_are_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ours()).encode() + b"\r\n")
    assert read_trace(path).references == 2


def test_the_end_of_a_trace_is_a_trace(tmp_path: Path) -> None:
    """Blocks that are not there are not counted, whatever the numbers of those that are."""
    lines = gzip.decompress((TRACES / "conv_a.jsonl.gz").read_bytes()).decode().splitlines()[-200:]
    (tmp_path / "end.jsonl").write_text("\n".join(lines))
    end = read_trace(tmp_path / "end.jsonl")
    assert end.blocks == len({ident for request in end.requests for ident in request.ids})
    assert (
        max(ident for request in recorded("conv_a").requests[-200:] for ident in request.ids) > 2 * end.blocks
    )
    huge = written(tmp_path, ours(hash_ranges=[[10**15, 2]]))
    assert read_trace(huge).blocks == 2


@pytest.mark.parametrize(
    ("line", "block_tokens", "told"),
    [
        (ours(input_length=512 * 20, hash_ranges=[[0, 20]]), 16, "20 blocks of 16 tokens are named"),
        (mooncake(input_length=512 * 20, hash_ids=list(range(20))), 16, "say how many with --block-tokens"),
        (ours(), 1024, "do not fit"),
        (mooncake(input_length=512 * 20, hash_ids=list(range(20))), 1024, "do not fit"),
        (ours(block_tokens=512), 16, "it says blocks of 512 tokens itself; leave out --block-tokens 16"),
        (ours(block_tokens=0), None, "block_tokens = 0"),
    ],
)
def test_blocks_of_another_length_than_was_said(
    tmp_path: Path, line: dict[str, Any], block_tokens: int | None, told: str
) -> None:
    with pytest.raises(TraceError) as error:
        read_trace(written(tmp_path, line), block_tokens=block_tokens)
    assert told in str(error.value)


def test_a_trace_through_a_pipe() -> None:
    packed = gzip.compress(json.dumps(ours()).encode() + b"\n" + json.dumps(ours(timestamp=5)).encode())
    for given in (packed, gzip.decompress(packed)):
        done = subprocess.run(
            [sys.executable, "-m", "tierkv.cli", "replay", "/dev/stdin", "--capacity", "2"],
            input=given, capture_output=True, timeout=60, check=True,
        )  # fmt: skip
        assert b"2 requests" in done.stdout


def test_nothing_is_written_over_what_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(tmp_path, ours(), ours())
    before, other = trace.read_bytes(), tmp_path / "sub" / ".." / "trace.jsonl"
    other.parent.parent.mkdir()
    new = str(tmp_path / "out.x")
    for words, told in (
        (["--json", str(trace)], "that is the trace"),
        (["--png", str(other)], "that is the trace"),
        (["--json", new, "--png", new], "that is the file of --json"),
        (["--json", str(tmp_path)], "that is a folder"),
        (["--json", "-"], "standard output has the table; name a file"),
    ):
        for command in ("replay", "plan"):
            assert cli.main([command, str(trace), *words]) == cli.USAGE
            shown = capsys.readouterr()
            assert told in shown.err
            assert not shown.out
    assert trace.read_bytes() == before
    assert cli.main(["replay", str(tmp_path)]) == cli.USAGE
    assert "that is a folder" in capsys.readouterr().err
