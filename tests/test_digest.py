"""Digests of real files and folders: what counts, what is remembered, what is refused."""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tierkv import digest as digest_module
from tierkv.clock import SystemClock
from tierkv.digest import adapter_from_path, default_cache_folder, digest_of, weights_from_path
from tierkv.errors import IdentityError
from tierkv.keys import Adapter, Weights, canonical


class LaterClock(SystemClock):
    """An hour ahead, so that files that were just written count as settled."""

    def unix_s(self) -> float:
        return super().unix_s() + 3600


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as a model hub makes it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-00001-of-00002.safetensors").write_bytes(os.urandom(50_000))
    (folder / "model-00002-of-00002.safetensors").write_bytes(os.urandom(20_000))
    (folder / "config.json").write_text('{"rope_theta": 10000}')
    (folder / "README.md").write_text("a model")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "digests"


def hashed_bytes(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> int:
    """How many bytes of content the call really hashes."""
    total = 0
    real = hashlib.sha256

    class Counting:
        def __init__(self, data: bytes = b"") -> None:
            self.inner = real(data)

        def update(self, data: memoryview) -> None:
            nonlocal total
            total += len(data)
            self.inner.update(data)

        def digest(self) -> bytes:
            return self.inner.digest()

        def hexdigest(self) -> str:
            return self.inner.hexdigest()

    with monkeypatch.context() as patch:
        patch.setattr(digest_module.hashlib, "sha256", Counting)
        call()
    return total


# ---- what counts


def test_a_folder_is_its_names_sizes_and_contents(model: Path) -> None:
    listing = tuple(
        (name, (model / name).stat().st_size, hashlib.sha256((model / name).read_bytes()).digest())
        for name in ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    )
    assert digest_of(model) == hashlib.sha256(canonical(("tierkv files", listing))).hexdigest()
    assert digest_of(str(model)) == digest_of(model)


def test_weights_and_adapters(model: Path, cache: Path) -> None:
    assert weights_from_path(model) == Weights("digest", digest_of(model))
    assert adapter_from_path("poet", model, cache_folder=cache) == Adapter("poet", digest_of(model))


def test_where_it_lies_does_not_matter(model: Path, tmp_path: Path) -> None:
    before = digest_of(model)
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    assert digest_of(copy) == before
    assert digest_of(model.rename(tmp_path / "renamed")) == before


def test_a_single_file_counts_without_its_name(tmp_path: Path) -> None:
    one, other = tmp_path / "one.gguf", tmp_path / "other.weights"
    one.write_bytes(b"tensors")
    other.write_bytes(b"tensors")
    assert digest_of(one) == digest_of(other)
    other.write_bytes(b"Tensors")
    assert digest_of(one) != digest_of(other)


def flip_one_bit(model: Path) -> None:
    path = model / "model-00002-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[19_999] ^= 1
    path.write_bytes(content)


CHANGES: dict[str, Callable[[Path], object]] = {
    "one bit": flip_one_bit,
    "a name": lambda model: (model / "model-00001-of-00002.safetensors").rename(model / "first.safetensors"),
    "a config": lambda model: (model / "config.json").write_text('{"rope_theta": 20000}'),
    "another shard": lambda model: (model / "model-3.bin").write_bytes(b""),
    "code": lambda model: (model / "modeling.py").write_text("scale = 2"),
    "a shard less": lambda model: (model / "model-00001-of-00002.safetensors").unlink(),
    "a sub-folder": lambda model: ((model / "lora").mkdir(), (model / "lora/a.pt").write_bytes(b"x")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_d4_other_weights_under_the_same_name_are_other_weights(model: Path, change: str) -> None:
    before = digest_of(model)
    CHANGES[change](model)
    assert digest_of(model) != before


def test_d2_an_adapter_that_was_reloaded_in_place_has_another_revision(model: Path) -> None:
    before = adapter_from_path("poet", model)
    flip_one_bit(model)
    after = adapter_from_path("poet", model)
    assert (before.name, after.name) == ("poet", "poet")
    assert before.revision != after.revision


def test_what_computes_nothing_does_not_count(model: Path) -> None:
    before = digest_of(model)
    (model / "README.md").write_text("another text")
    (model / "tokenizer.json").unlink()
    (model / ".cache").mkdir()
    (model / ".cache/old.safetensors").write_bytes(b"old")
    (model / ".hidden.bin").write_bytes(b"hidden")
    os.mkfifo(model / "pipe.bin")
    assert digest_of(model) == before


def test_contents_that_move_between_files_are_seen(tmp_path: Path) -> None:
    made = []
    for number, (one, other) in enumerate(((b"ab", b"c"), (b"a", b"bc"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "1.bin").write_bytes(one)
        (folder / "2.bin").write_bytes(other)
        made.append(digest_of(folder))
    assert made[0] != made[1]


def test_links_are_followed_and_may_lead_back(model: Path, tmp_path: Path) -> None:
    """Model hubs keep the content elsewhere and link to it."""
    hub = tmp_path / "snapshot"
    hub.mkdir()
    for file in model.iterdir():
        (hub / file.name).symlink_to(file)
    assert digest_of(hub) == digest_of(model)
    (hub / "again").symlink_to(hub)
    assert digest_of(hub) == digest_of(model)
    (tmp_path / "link").symlink_to(hub)
    assert digest_of(tmp_path / "link") == digest_of(model)


# ---- what is refused


def test_what_cannot_be_digested_is_refused(tmp_path: Path, model: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.json").write_text("{}")
    with pytest.raises(IdentityError, match=r"empty has no file with tensors \(.bin, .*: give the path"):
        digest_of(tmp_path / "empty")
    with pytest.raises(IdentityError, match=r"missing cannot be digested: .*No such file"):
        digest_of(tmp_path / "missing")
    (model / "gone.bin").symlink_to(tmp_path / "nowhere")
    with pytest.raises(IdentityError, match=r"model cannot be digested: .*nowhere"):
        digest_of(model)


def at_first_call(action: Callable[[], object]) -> Callable[[int, int], None]:
    calls: list[int] = []

    def progress(done_bytes: int, total_bytes: int) -> None:
        if not calls:
            action()
        calls.append(done_bytes)

    return progress


LATE_CHANGES: dict[str, Callable[[Path], object]] = CHANGES | {
    "replaced": lambda model: os.replace(
        shutil.copy(model / "config.json", model / "new"), model / "config.json"
    ),
    "grown": lambda model: os.truncate(model / "model-00002-of-00002.safetensors", 30_000),
    "cut": lambda model: os.truncate(model / "model-00002-of-00002.safetensors", 100),
    "the first again": lambda model: os.utime(model / "model-00001-of-00002.safetensors"),
}


@pytest.mark.parametrize("change", LATE_CHANGES)
def test_a_change_meanwhile_is_an_error(model: Path, cache: Path, change: str) -> None:
    with pytest.raises(IdentityError, match=r"changed while it was digested|cannot be digested"):
        digest_of(model, progress=at_first_call(lambda: LATE_CHANGES[change](model)), cache_folder=cache)
    digest_of(model)  # and nothing is wrong afterwards


def test_what_progress_raises_ends_it(model: Path, cache: Path) -> None:
    class Stop(Exception):
        pass

    def stop(done_bytes: int, total_bytes: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        digest_of(model, progress=stop, cache_folder=cache, clock=LaterClock())
    assert not cache.exists()


def test_progress_adds_up(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(9 * 1024 * 1024))
    (tmp_path / "b.bin").write_bytes(bytes(5))
    total = 9 * 1024 * 1024 + 5
    for expected in (
        [4 * 1024 * 1024, 8 * 1024 * 1024, 9 * 1024 * 1024, total],
        [9 * 1024 * 1024, total],  # from the cache
    ):
        told: list[tuple[int, int]] = []

        def progress(done_bytes: int, total_bytes: int, told: list[tuple[int, int]] = told) -> None:
            told.append((done_bytes, total_bytes))

        digest_of(tmp_path, progress=progress, cache_folder=cache, clock=LaterClock())
        assert told == [(done, total) for done in expected]


# ---- what is remembered


def test_the_second_time_nothing_is_read(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again() -> str:
        return digest_of(model, cache_folder=cache, clock=LaterClock())

    size = sum(
        (model / name).stat().st_size
        for name in os.listdir(model)
        if name.endswith((".safetensors", "config.json"))
    )
    plain = digest_of(model)
    assert hashed_bytes(monkeypatch, again) == size
    assert hashed_bytes(monkeypatch, again) == 0
    assert again() == plain
    assert len(list(cache.iterdir())) == 3
    assert cache.stat().st_mode & 0o777 == 0o700


def test_only_what_changed_is_read_again(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again() -> str:
        return digest_of(model, cache_folder=cache, clock=LaterClock())

    before = again()
    path = model / "model-00002-of-00002.safetensors"
    stat = path.stat()
    flip_one_bit(model)
    # As an archive or an image would: another content of the same size, the same inode and time.
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino) == (
        stat.st_size,
        stat.st_mtime_ns,
        stat.st_ino,
    )
    assert hashed_bytes(monkeypatch, again) == stat.st_size
    assert again() == digest_of(model) != before


def test_a_file_that_just_changed_is_not_remembered(model: Path, cache: Path) -> None:
    """It could change again within the same tick and bear the same stamp."""
    assert digest_of(model, cache_folder=cache) == digest_of(model)
    assert not cache.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry.write_text(""),
        lambda entry: entry.write_text("[]"),
        lambda entry: entry.write_text('{"sha256": "aa"}'),
        lambda entry: entry.write_bytes(b"\xff\xfe\xfd"),
        lambda entry: entry.write_text(json.dumps(json.loads(entry.read_text()) | {"sha256": "zz" * 32})),
        lambda entry: entry.write_text(json.dumps(json.loads(entry.read_text()) | {"sha256": 5})),
        lambda entry: (entry.unlink(), entry.mkdir()),
    ],
)
def test_a_damaged_entry_is_digested_again(
    model: Path, cache: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    plain = digest_of(model, cache_folder=cache, clock=LaterClock())
    for entry in list(cache.iterdir()):
        damage(entry)
    with caplog.at_level(logging.WARNING, "tierkv"):
        assert digest_of(model, cache_folder=cache, clock=LaterClock()) == plain
    assert "cannot be used" in caplog.text


def test_an_entry_of_another_file_is_not_taken(model: Path, cache: Path) -> None:
    digest_of(model, cache_folder=cache, clock=LaterClock())
    one, other, *_ = sorted(cache.iterdir())
    one.write_bytes(other.read_bytes())
    assert digest_of(model, cache_folder=cache, clock=LaterClock()) == digest_of(model)


def test_a_cache_that_cannot_be_written_only_costs_time(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "tierkv"):
        assert digest_of(model, cache_folder=tmp_path / "file/cache", clock=LaterClock()) == digest_of(model)
    assert "cannot be kept" in caplog.text


def test_threads_and_processes_share_a_cache(model: Path, cache: Path) -> None:
    plain = digest_of(model)
    barrier = threading.Barrier(8)

    def at_once(_: int) -> str:
        barrier.wait(timeout=30)
        return digest_of(model, cache_folder=cache, clock=LaterClock())

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(at_once, range(8))) == {plain}
    code = "import sys; from tierkv.digest import digest_of; print(digest_of(sys.argv[1], cache_folder=sys.argv[2]))"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(model), str(cache)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    assert {process.communicate(timeout=60)[0].strip() for process in running} == {plain}
    assert sorted(path.suffix for path in cache.iterdir()) == [".json"] * 3, "no half-written file is left"


def test_the_default_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_folder() == Path("/somewhere/tierkv/digests")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_cache_folder() == Path("/home/me/.cache/tierkv/digests")
