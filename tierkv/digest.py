"""Digests of weight and adapter files: what a namespace and an adapter's revision are made of.

A name or a path says nothing about content; these digests do. They are sha256 over every byte, so the first one of a
large model takes minutes (0.5 to 2 GB/s): make it on a thread of its own (hashing and reading release the GIL), and let
everything miss until it is there. It is remembered in a cache folder, so that the next start takes milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from tierkv.clock import Clock, SystemClock
from tierkv.errors import IdentityError
from tierkv.keys import Adapter, Weights, canonical

log = logging.getLogger("tierkv")

WEIGHT_SUFFIXES = frozenset(
    {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", ".pt", ".pth", ".safetensors"}
)
"""Files that hold tensors. A folder without any is no model."""

SHAPING_NAMES = frozenset(
    {
        "adapter_config.json",
        "config.json",
        "hf_quant_config.json",
        "params.json",
        "quantization_config.json",
        "quantize_config.json",
    }
)
"""Files that change what is computed from the tensors (scales, rope, quantization)."""

SHAPING_SUFFIXES = frozenset({".py"})
"""A model may bring code of its own."""

Progress = Callable[[int, int], None]
"""``progress(done_bytes, total_bytes)``, after every few MiB, on the thread that digests; what it raises ends that."""

_CHUNK_BYTES = 4 * 1024 * 1024
_SETTLED_S = 2.0
"""A file that changed less than this ago could change again within the same tick of the file system's clock."""
_CACHE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What tells whether a file is still the one that was digested. ``ctime_ns`` is there because archives and images
    set the other times to constants, and file systems use an inode again."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, stat: os.stat_result) -> _Stamp:
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def weights_from_path(
    path: str | os.PathLike[str],
    *,
    cache_folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Weights:
    """The identity of the weights in a file or folder. See ``digest_of``."""
    return Weights("digest", digest_of(path, cache_folder=cache_folder, progress=progress))


def adapter_from_path(
    name: str,
    path: str | os.PathLike[str],
    *,
    cache_folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Adapter:
    """An adapter with the digest of its files as its revision. See ``digest_of``."""
    return Adapter(name, digest_of(path, cache_folder=cache_folder, progress=progress))


def default_cache_folder() -> Path:
    """``tierkv/digests`` in the user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tierkv" / "digests"


def digest_of(
    path: str | os.PathLike[str],
    *,
    cache_folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> str:
    """The sha256, in hex, of a file, or of the relevant files of a folder with their relative names and sizes.

    A single file counts without its name. In a folder the files with tensors, the configurations that shape the
    computation and the model's own code count, at any depth, hidden ones aside; links are followed. With a
    ``cache_folder`` the digest of a file is read no second time until its path, size, times or inode differ; without
    one nothing is written. Blocking; may be called from several threads and processes at once. Raises
    ``IdentityError`` when there is nothing to digest, when a file cannot be read, and when one changes meanwhile.
    """
    root = Path(path)
    cache = None if cache_folder is None else _Cache(Path(cache_folder), clock or SystemClock())
    try:
        files = _relevant_files(root)
        stamps = {name: _Stamp.of(file.stat()) for name, file in files.items()}
        meter = _Meter(sum(stamp.size for stamp in stamps.values()), progress)
        digests = {name: _digest_file(file, stamps[name], cache, meter) for name, file in files.items()}
        if _relevant_files(root) != files or any(
            _Stamp.of(file.stat()) != stamps[name] for name, file in files.items()
        ):
            raise _changed(root)
    except OSError as error:
        raise IdentityError(f"{root} cannot be digested: {error}") from error
    listing = tuple((name, stamps[name].size, digests[name]) for name in sorted(files))
    return hashlib.sha256(canonical(("tierkv files", listing))).hexdigest()


def _relevant_files(root: Path) -> dict[str, Path]:
    """Relative name -> resolved file."""
    if root.is_file():
        return {"": root.resolve()}
    found = {}
    for file in _walk(root):
        suffix = file.suffix.lower()
        if suffix in WEIGHT_SUFFIXES or suffix in SHAPING_SUFFIXES or file.name in SHAPING_NAMES:
            target = file.resolve(strict=True)
            if target.is_file():  # a pipe of that name would never end
                found[file.relative_to(root).as_posix()] = target
    if not any(Path(name).suffix.lower() in WEIGHT_SUFFIXES for name in found):
        what = "has no file with tensors" if root.is_dir() else "is no file or folder"
        raise IdentityError(
            f"{root} {what} ({', '.join(sorted(WEIGHT_SUFFIXES))}): give the path of the weights"
        )
    return found


def _walk(root: Path) -> Iterator[Path]:
    seen: set[Path] = set()
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=_raise):
        place = Path(folder).resolve()
        if place in seen:  # a link that leads back
            subfolders.clear()
            continue
        seen.add(place)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error


def _changed(path: Path) -> IdentityError:
    return IdentityError(f"{path} changed while it was digested; try again when nothing writes to it")


class _Meter:
    """Adds up what was done, for the progress callback."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self._total_bytes = total_bytes
        self._progress = progress
        self._done_bytes = 0

    def add(self, count_bytes: int) -> None:
        self._done_bytes += count_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


def _digest_file(file: Path, stamp: _Stamp, cache: _Cache | None, meter: _Meter) -> bytes:
    known = cache.look_up(file, stamp) if cache is not None else None
    if known is not None:
        meter.add(stamp.size)
        return known
    started_s = cache.now_s() if cache is not None else 0.0
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(1, stamp.size))))
    with file.open("rb", buffering=0) as source:
        if _Stamp.of(os.fstat(source.fileno())) != stamp:
            raise _changed(file)
        left = stamp.size
        while count := source.readinto(buffer):
            digest.update(buffer[:count])
            left -= count
            if left < 0:
                break
            meter.add(count)
        if left or _Stamp.of(os.fstat(source.fileno())) != stamp:
            raise _changed(file)
    if cache is not None:
        cache.note(file, stamp, digest.digest(), started_s)
    return digest.digest()


class _Cache:
    """One small JSON file for each digested file, so that processes never write over each other's entries."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock

    def now_s(self) -> float:
        return self._clock.unix_s()

    def look_up(self, file: Path, stamp: _Stamp) -> bytes | None:
        try:
            entry = json.loads(self._entry_of(file).read_text("utf-8"))
            if entry["key"] == self._key(file, stamp) and len(entry["sha256"]) == 64:
                return bytes.fromhex(entry["sha256"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("the cached digest of %s cannot be used (%s); digesting it again", file, error)
        return None

    def note(self, file: Path, stamp: _Stamp, digest: bytes, started_s: float) -> None:
        """Remembers a digest, unless the file was young enough that a later change might bear the same stamp."""
        if max(stamp.mtime_ns, stamp.ctime_ns) / 1e9 > started_s - _SETTLED_S:
            return
        entry = {"key": self._key(file, stamp), "sha256": digest.hex()}
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_atomically(self._entry_of(file), json.dumps(entry))
        except OSError as error:
            log.warning("the digest of %s cannot be kept in %s: %s", file, self._folder, error)

    def _key(self, file: Path, stamp: _Stamp) -> list[object]:
        return [_CACHE_FORMAT, os.fsencode(file).hex(), *astuple(stamp)]

    def _entry_of(self, file: Path) -> Path:
        return self._folder / f"{hashlib.sha256(os.fsencode(file)).hexdigest()[:32]}.json"


def _write_atomically(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8") as target:
            target.write(text)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
