"""Memory limits: what the machine has, and what control groups of both versions and resource limits allow (D29)."""

import subprocess
import sys
from pathlib import Path

import pytest

from tierkv.config import load_config
from tierkv.config_memory import Machine, memory_limits, smallest_memory_limit
from tierkv.errors import ConfigError
from tierkv.units import GIB, MIB

ROOT = Path(__file__).parent.parent
UNLIMITED_V1 = 9223372036854771712


def machine(tmp_path: Path, groups: str, limits: dict[str, object], ram: int = 64 * GIB) -> Machine:
    """Folders that look like /proc and /sys/fs/cgroup."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal:       {ram // 1024} kB\nMemFree:        1 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    for name, limit in limits.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")
    return Machine(tmp_path / "proc", tmp_path / "cgroup")


V1 = "11:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "limits", "smallest"),
    [
        pytest.param("0::/\n", {}, 64 * GIB, id="none"),
        pytest.param("0::/\n", {"memory.max": "max"}, 64 * GIB, id="v2 without a limit"),
        pytest.param("0::/\n", {"memory.max": 2 * GIB}, 2 * GIB, id="v2 container"),
        pytest.param("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": GIB}, GIB, id="v2 group above"),
        pytest.param("0::/a/b\n", {"a/b/memory.max": GIB, "a/memory.max": 2 * GIB}, GIB, id="v2 own group"),
        pytest.param("0::/../../x\n", {"memory.max": GIB}, GIB, id="v2 seen from a namespace"),
        pytest.param("0::/gone\n", {"memory.max": GIB}, GIB, id="v2 path of the host"),
        pytest.param(
            "0::/a\n", {"memory.max": 900 * GIB, "a/memory.max": "max"}, 64 * GIB, id="above the RAM"
        ),
        pytest.param(V1, {"memory/docker/abc/memory.limit_in_bytes": GIB}, GIB, id="v1"),
        pytest.param(V1, {"memory/memory.limit_in_bytes": GIB}, GIB, id="v1 container"),
        pytest.param(V1, {"memory/memory.limit_in_bytes": UNLIMITED_V1}, 64 * GIB, id="v1 without a limit"),
        pytest.param(V1, {"memory/docker/memory.limit_in_bytes": GIB}, GIB, id="v1 group above"),
        pytest.param(V1, {"cpu/memory.limit_in_bytes": GIB}, 64 * GIB, id="v1 other controller"),
        pytest.param(V1, {"memory/memory.limit_in_bytes": 3 * GIB, "memory.max": GIB}, GIB, id="both"),
    ],
)
def test_d29_smallest_limit(groups: str, limits: dict[str, object], smallest: int, tmp_path: Path) -> None:
    found = smallest_memory_limit(machine(tmp_path, groups, limits))
    assert found is not None
    assert found.bytes == smallest


def test_the_limit_says_where_it_stands(tmp_path: Path) -> None:
    found = smallest_memory_limit(machine(tmp_path, "0::/a\n", {"a/memory.max": GIB}))
    assert found is not None
    assert str(tmp_path / "cgroup" / "a" / "memory.max") in found.where


def test_nothing_to_read_is_no_limit(tmp_path: Path) -> None:
    assert smallest_memory_limit(Machine(tmp_path / "none", tmp_path / "none")) is None
    load_config(environ={}, machine=Machine(tmp_path / "none", tmp_path / "none"), host_capacity="900 TiB")


def test_this_machine_has_limits() -> None:
    limits = list(memory_limits(Machine()))
    assert limits
    assert all(limit.bytes >= MIB for limit in limits)


def test_d29_a_control_group_below_the_arena(tmp_path: Path) -> None:
    small = machine(tmp_path, "0::/pod\n", {"pod/memory.max": GIB})
    with pytest.raises(ConfigError) as caught:
        load_config(environ={}, machine=small, host_capacity="1 GiB")
    message = str(caught.value)
    assert "host.capacity = '1 GiB'" in message
    assert "cgroup/pod/memory.max) is 1 GiB" in message
    assert "use at most 921.6 MiB" in message
    assert load_config(environ={}, machine=small, host_capacity="921 MiB").host.capacity_bytes == 921 * MIB


def test_d29_the_default_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"host\.capacity = '1 GiB': .*\(the default\)"):
        load_config(environ={}, machine=machine(tmp_path, "0::/\n", {"memory.max": 512 * MIB}))


def test_d29_the_private_server_counts(tmp_path: Path) -> None:
    small = machine(tmp_path, "0::/\n", {"memory.max": 2 * GIB})
    load_config(environ={}, machine=small, host_capacity="1 GiB")
    with pytest.raises(ConfigError, match=r"with valkey\.embedded_memory \(1 GiB\) it does not fit"):
        load_config(environ={}, machine=small, host_capacity="1 GiB", valkey_url="embedded")
    load_config(environ={}, machine=small, host_capacity="1 GiB", valkey_url="valkey://elsewhere")


def test_a_big_machine_keeps_little_back(tmp_path: Path) -> None:
    big = machine(tmp_path, "0::/\n", {}, ram=1024 * GIB)
    assert load_config(environ={}, machine=big, host_capacity="1023 GiB").host.capacity_bytes == 1023 * GIB
    with pytest.raises(ConfigError, match="the RAM of this machine is 1 TiB, of which 512 MiB stays"):
        load_config(environ={}, machine=big, host_capacity="1024 GiB")


def limited(limit: str, soft_bytes: int, *words: str) -> subprocess.CompletedProcess[str]:
    """`tierkv config check`, or what the words say, in a real process under a real resource limit."""
    words = words or ("config", "check")
    code = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.{limit}, ({soft_bytes}, resource.getrlimit(resource.{limit})[1]))\n"
        "from tierkv.cli import main\n"
        f"sys.exit(main({list(words)!r}))\n"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_d29_little_lockable_memory_is_noted_by_the_doctor_alone() -> None:
    done = limited("RLIMIT_MEMLOCK", 64 * 1024, "doctor")
    assert "RLIMIT_MEMLOCK is 64 KiB, less than host.capacity" in done.stdout
    done = limited("RLIMIT_MEMLOCK", 64 * 1024)
    assert done.returncode == 0, done.stderr
    assert "RLIMIT_MEMLOCK" not in done.stdout, "it matters to few"


def test_d29_a_limited_address_space_is_refused() -> None:
    done = limited("RLIMIT_AS", GIB)
    assert done.returncode == 2
    assert "limit of the address space (ulimit -v) is 1 GiB" in done.stderr
