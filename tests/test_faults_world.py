"""The whole store while its disk, its network and its server fail at any step and at the n-th call."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.client_support import PATIENCE_S, live
from tests.faults_support import CALL_S, GROUPS, PLAIN, Disturb, FaultyTiers, Life
from tests.nvme_support import quick_folder
from tests.valkey_server import ValkeyServer, running_server
from tierkv.errors import TierError
from tierkv.layout import Layout
from tierkv.testing import faults
from tierkv.testing.faults import Strike, TcpProxy, Way, each_call, proxy_before
from tierkv.testing.faults.certificates import Authority
from tierkv.testing.faults.disk import CALLS, Gate, Hook

STEPS = (
    "put", "flush nvme", "flush valkey", "read nvme", "read valkey", "clear", "look after clear", "flush again",
    "restart",
)  # fmt: skip

PATIENT = {"nvme_s": PATIENCE_S, "load_s": PATIENCE_S}
"""Only the server is in trouble: what the disk has is never missed, and what the server has is, by its own time."""

LAYOUTS = pytest.mark.parametrize("layout", [PLAIN, GROUPS], ids=["plain", "two groups of n=4"])

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with quick_folder(tmp_path) as folder:
        yield folder


# ---- the disk, at its n-th call

WAYS_OF_A_DISK: dict[str, Callable[[Strike], Hook]] = {
    "EIO": lambda strike: faults.failing(errno.EIO, strike=strike),
    "ENOSPC": lambda strike: faults.failing(errno.ENOSPC, strike=strike),
    "EINVAL": lambda strike: faults.failing(errno.EINVAL, strike=strike),
    "short": lambda strike: faults.short(4096, strike=strike),
    "nothing": lambda strike: faults.short(0, strike=strike),
    "slow": lambda strike: faults.slow(0.01, strike=strike),
    "blocked": lambda strike: faults.blocked(strike=strike),
}


def with_a_disk_that_fails(
    way: str, layout: Layout, folder: Path, server: ValkeyServer, *, times: int | None, first: int, step: int
) -> int:
    """For n = first, first + step ... until nothing is struck; how many lives there were."""
    count = 0
    for strike in each_call(*CALLS, times=times, first=first, step=step):
        count += 1
        server.do("FLUSHALL")
        hook = WAYS_OF_A_DISK[way](strike)

        def spoil(at: str, life: Life, hook: Hook = hook) -> None:
            assert life.rig.disk is not None
            life.rig.disk.before = hook

        def mend(life: Life, hook: Hook = hook) -> None:
            assert life.rig.disk is not None
            if isinstance(hook, Gate):
                hook.open.set()
            life.rig.disk.heal()

        Life(folder / f"{way}-{strike.nth}", server.address, layout, disturb=spoil, mend=mend).run()
    return count


@pytest.mark.parametrize("times", [1, None], ids=["once", "for ever"])
@pytest.mark.parametrize("way", WAYS_OF_A_DISK)
def test_d9_d10_d22_calls_of_the_disk_fail(
    way: str, times: int | None, folder: Path, server: ValkeyServer
) -> None:
    """A sample of n; ``make torture`` takes all of them."""
    first, step = 1 + list(WAYS_OF_A_DISK).index(way), 4 if way in ("short", "nothing") else 11
    assert with_a_disk_that_fails(way, PLAIN, folder, server, times=times, first=first, step=step) > 2


@pytest.mark.torture
@pytest.mark.parametrize("times", [1, None], ids=["once", "for ever"])
@pytest.mark.parametrize("way", WAYS_OF_A_DISK)
@LAYOUTS
def test_d9_d10_d22_the_nth_call_of_the_disk_fails(
    way: str, times: int | None, layout: Layout, folder: Path, server: ValkeyServer
) -> None:
    assert with_a_disk_that_fails(way, layout, folder, server, times=times, first=1, step=1) > 5


# ---- the tiers, with two layer groups

GROUP_WAYS = [
    (call, way)
    for call, ways in (
        ("get_into", (Way.ERROR, Way.SHORT, Way.FLIPPED, Way.FOREIGN, Way.FALSE)),
        ("put_from", (Way.HALFWAY, Way.SHORT, Way.FALSE)),
        ("probe", (Way.FALSE,)),
    )
    for way in ways
]


@pytest.mark.parametrize("tier", ["nvme", "valkey"])
@pytest.mark.parametrize(("call", "way"), GROUP_WAYS, ids=[f"{call}-{way.value}" for call, way in GROUP_WAYS])
def test_d8_d9_d10_the_nth_call_fails_with_two_groups_and_four_engine_blocks(
    tier: str, call: str, way: Way, folder: Path, server: ValkeyServer
) -> None:
    for strike in each_call(call):
        server.do("FLUSHALL")
        tiers = FaultyTiers(tier, strike, way)
        Life(folder / str(strike.nth), server.address, GROUPS, mend=tiers.mend, wrap=tiers.wrap).run()


# ---- the server, at each step


def only_at(step: str, break_it: Callable[[], None]) -> Disturb:
    return lambda at, life: break_it() if at == step else None


@pytest.mark.parametrize("fault", ["hung", "killed"])
@pytest.mark.parametrize("step", STEPS)
def test_d17_the_server_hangs_or_dies_at_each_step(step: str, fault: str, folder: Path) -> None:
    with running_server() as server:
        stopped = fault == "hung"

        def break_it() -> None:
            server.hang() if stopped else server.kill()

        def mend(life: Life) -> None:
            if stopped:
                server.go_on()
            elif not server.running:
                server.start()

        life = Life(
            folder / "nvme",
            server.address,
            disturb=only_at(step, break_it),
            mend=mend,
            own=("child processes",),
        )
        life.run()
        assert life.loads[0] == 3, "host RAM does not depend on a server"
        if step != "read nvme":
            assert life.loads[1] == 3, "nor does the disk"


# ---- the link, at each step


def spoilt(proxy: TcpProxy, fault: str) -> None:
    match fault:
        case "black hole":
            proxy.black_hole = True
        case "refused":
            proxy.refuse = True
            proxy.drop_all()
        case "one kilobyte a second":
            proxy.bytes_per_s = proxy.upload_bytes_per_s = 1024
        case "delayed":
            proxy.delay_s = 2 * CALL_S


@pytest.mark.parametrize("fault", ["black hole", "refused", "one kilobyte a second", "delayed"])
@pytest.mark.parametrize("step", ["flush valkey", "read valkey", "clear", "restart"])
def test_d17_the_link_fails_at_each_step(step: str, fault: str, folder: Path, server: ValkeyServer) -> None:
    server.do("FLUSHALL")
    with proxy_before(("127.0.0.1", server.port)) as proxy:
        life = Life(
            folder / "nvme",
            f"valkey://127.0.0.1:{proxy.port}",
            disturb=only_at(step, lambda: spoilt(proxy, fault)),
            mend=lambda life: proxy.heal(),
            **PATIENT,
        )
        life.run()
        assert life.loads[:2] == [3, 3]


@pytest.mark.parametrize("way", ["down", "up"])
@pytest.mark.parametrize("after_bytes", [0, 1, 31, 32, 33, 511, 512, 4608, 9000, 13800, 20000])
def test_d10_d18_the_link_is_cut_after_so_many_bytes(
    after_bytes: int, way: str, folder: Path, server: ValkeyServer
) -> None:
    """Counted from the first write on, in either direction."""
    server.do("FLUSHALL")
    with proxy_before(("127.0.0.1", server.port)) as proxy:

        def arm() -> None:
            proxy.arm_cut(after_bytes) if way == "down" else proxy.arm_upload_cut(after_bytes)

        Life(
            folder / "nvme",
            f"valkey://127.0.0.1:{proxy.port}",
            disturb=only_at("flush valkey", arm),
            mend=lambda life: proxy.heal(),
        ).run()


# ---- TLS


def test_d17_d29_a_bad_authority_or_a_wrong_name_is_refused_at_the_start(
    tmp_path: Path, server: ValkeyServer
) -> None:
    authority = Authority(tmp_path)
    for name, files in (
        ("localhost", authority.client_with_bad_ca()),
        ("elsewhere.example", authority.client()),
    ):
        with proxy_before(server.path, authority.server(name)) as proxy, faults.nothing_left():
            address = f"valkeys://localhost:{proxy.port}"
            with (
                pytest.raises(TierError, match="certificate is not accepted"),
                live(4, nvme=tmp_path / "nvme", valkey=address, valkey_options={"tls_files": files}),
            ):
                pass
            proxy.drop_all()
    assert os.listdir(tmp_path / "nvme")
    with proxy_before(server.path, authority.server()) as proxy:
        address = f"valkeys://localhost:{proxy.port}"
        with live(
            4, nvme=tmp_path / "nvme", valkey=address, valkey_options={"tls_files": authority.client()}
        ) as rig:
            assert rig.store.edges[2].tier.usage().writable
