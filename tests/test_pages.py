"""Mapped memory: huge pages change nothing but the number of faults, and a view keeps what it shows."""

from __future__ import annotations

import itertools
import os
import random
import re
import resource
import threading
from pathlib import Path

import pytest

from tierkv.pages import HUGE_BYTES, Stretch, private_memory, shared_memory, shared_pages_can_be_huge
from tierkv.testing.threads import Keeper
from tierkv.units import ALIGN_BYTES, MIB

SIZE_BYTES = 12 * HUGE_BYTES + 5 * ALIGN_BYTES


@pytest.fixture
def file() -> int:
    """Of ``SIZE_BYTES``; the test closes it."""
    fd = os.memfd_create("tierkv-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE_BYTES)
    return fd


def map_and_close(fd: int) -> Stretch:
    memory = shared_memory(fd, SIZE_BYTES)
    os.close(fd)
    return memory


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * ALIGN_BYTES


def test_all_of_a_memory_file_is_mapped_and_nothing_else(file: int) -> None:
    first = shared_memory(file, SIZE_BYTES)
    second = map_and_close(file)
    assert len(first.view()) == len(second.view()) == SIZE_BYTES
    for at in (0, HUGE_BYTES - 1, HUGE_BYTES, SIZE_BYTES - 1):
        first.view()[at] = 1 + at % 251
        assert second.view()[at] == 1 + at % 251
    assert second.view().tobytes().count(0) == SIZE_BYTES - 4
    first.close()
    second.close()


def test_populate_changes_nothing_while_others_write(file: int) -> None:
    """One writes through a mapping of its own, as another process would."""
    memory, other = shared_memory(file, SIZE_BYTES), map_and_close(file)
    begun, over = threading.Event(), threading.Event()
    written: dict[int, int] = {}

    def write() -> None:
        dice, view = random.Random(5), other.view()
        for number in itertools.count():
            if over.is_set() and number > 1000:
                return
            at = dice.randrange(SIZE_BYTES)
            view[at] = written[at] = number % 255 + 1
            begun.set()

    keeper = Keeper()

    def run() -> None:
        with keeper:
            write()

    writer = threading.Thread(target=run)
    writer.start()
    assert begun.wait(10)
    assert memory.populate(lambda: False) in (0, SIZE_BYTES)  # 0: a kernel that cannot
    over.set()
    writer.join()
    assert keeper.error is None
    found = memory.view()
    assert {at: found[at] for at in written} == written
    assert found.tobytes().count(0) == SIZE_BYTES - len(written)


def kernel_makes_huge_pages() -> bool:
    """As it says itself."""
    release = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
    chosen = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return release >= (6, 1) and chosen.exists() and "[deny]" not in chosen.read_text()


@pytest.mark.skipif(not kernel_makes_huge_pages(), reason="this kernel makes no huge pages of shared memory")
def test_who_maps_what_another_has_touched_faults_once_for_each_huge_page(file: int) -> None:
    assert shared_pages_can_be_huge()
    memory = shared_memory(file, SIZE_BYTES)
    assert memory.populate(lambda: False) == SIZE_BYTES
    assert memory.huge_bytes == 12 * HUGE_BYTES
    view = map_and_close(file).view()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    view[::ALIGN_BYTES] = bytes(len(view[::ALIGN_BYTES]))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < SIZE_BYTES // ALIGN_BYTES // 8


def test_populate_ends_when_it_is_told_and_does_nothing_after_the_end(file: int) -> None:
    memory = map_and_close(file)
    assert memory.populate(lambda: True) == 0
    memory.close()
    assert memory.populate(lambda: False) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_the_memory_goes_with_the_last_view_of_it(file: int, shared: bool) -> None:
    before_bytes = mapped_bytes()
    memory = map_and_close(file) if shared else private_memory(SIZE_BYTES)
    if not shared:
        os.close(file)
    assert mapped_bytes() >= before_bytes + SIZE_BYTES
    view = memory.view()[ALIGN_BYTES : 2 * ALIGN_BYTES]
    memory.close()
    view[0] = 7
    assert view[0] == 7
    del view, memory
    assert mapped_bytes() < before_bytes + SIZE_BYTES


def test_what_cannot_be_mapped_is_told_with_its_size() -> None:
    read, write = os.pipe()
    with pytest.raises(OSError, match=f"memory file of {MIB} bytes"):
        shared_memory(read, MIB)
    os.close(read)
    os.close(write)
