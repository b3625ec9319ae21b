"""Every call that the NVMe tier makes to the disk, in one object, so that tests can make any of them fail.

``Disk`` is thin: one system call a method, no state. What repeats a short call is here too, because a short read is
as much a part of the disk's manner as a full one.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence

from tierkv.units import ALIGN_BYTES

Buffers = Sequence[memoryview]

_MOVES_IN_VAIN = 16
"""So many calls in a row that move nothing are an error, not a reason to go on."""


class Disk:
    """The real disk. Thread-safe: it holds nothing. Every method raises ``OSError`` as the system call does.

    ``preadv(fd, buffers, offset)`` and ``pwritev(fd, buffers, offset)`` return how many bytes they moved.
    """

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    preadv = staticmethod(os.preadv)
    pwritev = staticmethod(os.pwritev)

    def fallocate(self, fd: int, size_bytes: int) -> None:
        os.posix_fallocate(fd, 0, size_bytes)

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def size_bytes(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def links(self, fd: int) -> int:
        """How many names the file has; 0 once it was removed."""
        return os.fstat(fd).st_nlink

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def make_directory(self, path: str) -> None:
        os.makedirs(path, mode=0o700, exist_ok=True)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def names(self, path: str) -> list[str]:
        return os.listdir(path)

    def space_bytes(self, path: str) -> tuple[int, int]:
        """What a user without privileges may still allocate, and the size of the whole file system."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def write_fully(
    disk: Disk, fd: int, buffers: Buffers, total_bytes: int, offset: int, align_bytes: int = 1
) -> None:
    """Writes all of ``buffers`` (``total_bytes`` together) at ``offset``, however often the system stops short.

    ``align_bytes`` is the unit that a direct write must begin at: a short write that ends inside one is taken up at
    its start again. Raises ``OSError``; a disk that makes no progress any more is ``EIO``.
    """
    try:
        if disk.pwritev(fd, buffers, offset) == total_bytes:
            return
    except InterruptedError:
        pass
    _in_pieces(disk.pwritev, fd, buffers, total_bytes, offset, align_bytes)


def read_fully(
    disk: Disk, fd: int, buffers: Buffers, total_bytes: int, offset: int, align_bytes: int = 1
) -> int:
    """Fills ``buffers`` (``total_bytes`` together) from ``offset`` and returns the bytes that came: fewer than asked
    only at the file's end. Raises ``OSError``."""
    try:
        if disk.preadv(fd, buffers, offset) == total_bytes:
            return total_bytes
    except InterruptedError:
        pass
    return _in_pieces(disk.preadv, fd, buffers, total_bytes, offset, align_bytes, zero_ends=True)


def _in_pieces(
    move: Callable[[int, Buffers, int], int],
    fd: int,
    buffers: Buffers,
    total_bytes: int,
    offset: int,
    align_bytes: int,
    zero_ends: bool = False,
) -> int:
    """Begins anew, and goes on where the system stops short."""
    done = in_vain = count = 0
    rest: Buffers = buffers
    while in_vain < _MOVES_IN_VAIN:
        try:
            count = move(fd, rest, offset + done)
        except InterruptedError:
            in_vain, count = in_vain + 1, 0
            continue
        moved = done + count
        if moved >= total_bytes or (zero_ends and count == 0):
            return moved
        moved -= moved % align_bytes
        in_vain = 0 if moved > done else in_vain + 1
        done = moved
        rest = _after(buffers, done)
    if zero_ends and count:  # the file ends inside a unit
        return done + count
    raise OSError(errno.EIO, f"the disk moved {done} of {total_bytes} bytes and then no more")


def _after(buffers: Buffers, skip_bytes: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        if skip_bytes < len(buffer):
            rest.append(buffer[skip_bytes:])
        skip_bytes = max(0, skip_bytes - len(buffer))
    return rest


def is_linked(disk: Disk, fd: int) -> bool:
    """False once the file was removed. A descriptor that somebody has closed meanwhile says nothing."""
    try:
        return disk.links(fd) > 0
    except OSError:
        return True


def remove_file(disk: Disk, fd: int, path: str) -> str:
    """Unlinks a file and closes it. Where the name stays, its bytes go, and the next start takes it for a file that was
    never written; what it held must not be found again. Returns why the name stays; empty when it is gone."""
    trouble = ""
    try:
        disk.unlink(path)
    except FileNotFoundError:
        pass  # somebody else has removed it
    except OSError as error:
        trouble = os.strerror(error.errno or 0)
        try:
            disk.truncate(fd, 0)
        except OSError:
            pass  # nothing more can be done
    disk.close(fd)
    return trouble


def aligned_buffer(size_bytes: int) -> memoryview:
    """Fresh zeroed memory that starts on a page boundary, as direct I/O wants it."""
    return memoryview(mmap.mmap(-1, size_bytes))


def probe_direct(disk: Disk, path: str) -> str | None:
    """Writes and reads back two pages of a new file at ``path`` with O_DIRECT. Returns why that fails, else ``None``.

    An open with O_DIRECT succeeds on file systems whose first direct write then fails, so only a real one counts.
    The file is gone afterwards.
    """
    out, back = aligned_buffer(2 * ALIGN_BYTES), aligned_buffer(2 * ALIGN_BYTES)
    out[:] = bytes(range(256)) * (len(out) // 256)
    try:
        fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        _unlink_if_there(disk, path)
        return f"open with O_DIRECT: {os.strerror(error.errno or 0)}"
    try:
        write_fully(disk, fd, (out[:ALIGN_BYTES], out[ALIGN_BYTES:]), len(out), 0, ALIGN_BYTES)
        count = read_fully(disk, fd, (back[:ALIGN_BYTES], back[ALIGN_BYTES:]), len(back), 0, ALIGN_BYTES)
    except OSError as error:
        return f"write and read with O_DIRECT: {os.strerror(error.errno or 0)}"
    finally:
        disk.close(fd)
        _unlink_if_there(disk, path)
    return None if count == len(out) and out == back else "a direct read gave other bytes than were written"


def _unlink_if_there(disk: Disk, path: str) -> None:
    try:
        disk.unlink(path)
    except FileNotFoundError:
        pass
