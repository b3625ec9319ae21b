"""What the store does with a tier whose writes fail: it tries again, later each time, and makes nobody wait in vain."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from tests.client_support import PATIENCE_S, Live, chain_of, held, live, loaded, put, put_all
from tests.valkey_server import eventually, running_server
from tierkv.testing import faults
from tierkv.testing.faults import FaultyTier, Strike, Way
from tierkv.tier import BlobTier, Outcome
from tierkv.tiers.nvme_watch import LOOK_EVERY_S

NOT_WAITED_S = 5.0
"""Much less than the timeouts here, and much more than a busy machine needs."""


class Counting:
    """Wraps tiers and counts the writes that reach them."""

    def __init__(self, strike: Strike, way: Way) -> None:
        self._strike = strike
        self._way = way
        self.made: list[FaultyTier] = []

    def __call__(self, tier: BlobTier) -> BlobTier:
        self.made.append(FaultyTier(tier, self._strike, self._way))
        return self.made[-1]


@pytest.mark.parametrize("way", [Way.ERROR, Way.HALFWAY])
@pytest.mark.parametrize("write", ["through", "on_evict"])
def test_d10_d17_a_write_that_fails_is_not_tried_again_at_once(tmp_path: Path, write: str, way: Way) -> None:
    """The breaker stays closed, since it takes a thousand failures; still a tier is asked rarely."""
    strike = Strike(1, "put_from", times=None)
    limits = {
        "breaker_failures": 1000,
        "breaker_cooldown_s": 1.0,
        "low_watermark": 0.9,
        "high_watermark": 0.9,
    }
    with live(4, nvme=tmp_path, nvme_spec={"write": write}, wrap=Counting(strike, way), **limits) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 3))
        eventually(lambda: strike.seen >= 3, "it is tried again", PATIENCE_S)
        began_s, before = time.monotonic(), strike.seen
        eventually(lambda: time.monotonic() > began_s + 0.5, "half a second is over")
        tries = strike.seen - before
        assert tries <= 0.5 / 0.05 + 1, f"{tries} tries in half a second"
        assert not rig.store.edges[1].tier.breaker.is_open
        strike.heal()
        eventually(
            lambda: held(rig.store, chain_of(rig.namespace(), 3))["nvme"] == [0, 1, 2], "it is written"
        )
        assert rig.store.edges[1].failures == 0


def test_d10_after_a_failure_the_next_try_comes_later_each_time_but_before_a_breakers() -> None:
    with running_server() as server, live(4, valkey=server.address, breaker_cooldown_s=1.0) as rig:
        edge = rig.store.edges[1]
        rests = []
        for _ in range(40):
            edge.back_off(now_s=100.0)
            rests.append(round(edge.rests_s(now_s=100.0), 3))
        assert rests[:6] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]
        assert set(rests[6:]) == {1.0}
        assert edge.rests_s(now_s=200.0) == 0.0
        edge.retry_at_s, edge.failures = 0.0, 0


def test_d10_what_failed_for_a_moment_is_written_before_the_store_closes(tmp_path: Path) -> None:
    """A short rest is no reason to give up at the end."""
    strike = Strike(1, "put_from")
    with live(4, nvme=tmp_path, nvme_spec={"write": "on_evict"}, wrap=Counting(strike, Way.ERROR)) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 3))
        assert rig.client.flush("nvme", timeout_s=PATIENCE_S).result(PATIENCE_S).failed == 3
    with live(4, nvme=tmp_path) as rig:
        assert loaded(rig.client, chain_of(rig.namespace(), 3)) == 3


def read_only(rig: Live) -> None:
    """Makes the NVMe tier read-only for good."""
    assert rig.disk is not None
    rig.disk.before = faults.failing(errno.EIO, faults.at("pwritev", "log-", header=False))
    put_all(rig.client, chain_of(rig.namespace(), 1, seed=77))
    assert rig.client.flush("nvme", timeout_s=PATIENCE_S).result(PATIENCE_S).failed
    rig.disk.heal()
    assert rig.store.edges[1].tier.refresh_usage().read_only


def test_d17_flush_to_a_tier_that_is_read_only_for_good_ends_at_once(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path) as rig:
        read_only(rig)
        put_all(rig.client, chain_of(rig.namespace(), 3))
        began_s = time.monotonic()
        report = rig.client.flush("nvme", timeout_s=3600.0).result(PATIENCE_S)
        assert time.monotonic() - began_s < NOT_WAITED_S
        assert (report.written, report.failed) == (0, 4)
        assert loaded(rig.client, chain_of(rig.namespace(), 3)) == 3


def test_d17_a_flush_during_which_the_tier_becomes_read_only_ends_then(tmp_path: Path) -> None:
    with live(200, nvme=tmp_path) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 150))  # several batches
        assert rig.disk is not None
        strike = Strike(2, "pwritev", times=None)
        rig.disk.before = faults.failing(errno.EIO, faults.at("pwritev", "log-", header=False), strike)
        report = rig.client.flush("nvme", timeout_s=3600.0).result(PATIENCE_S)
        assert report.failed
        assert report.written + report.failed == 150
        rig.disk.heal()


def test_d22_removed_files_are_noticed_and_the_store_goes_on(tmp_path: Path) -> None:
    """Somebody removes everything in the directory of a running store."""
    path = tmp_path / "nvme"
    with live(8, nvme=path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        for file in path.iterdir():
            file.unlink()
        rig.clock.advance(LOOK_EVERY_S)
        rig.store.upkeep.make_rounds()
        rig.settle()
        assert not rig.store.edges[1].tier.usage().writable
        assert "removed" in str(rig.client.stats()["tiers"]["nvme"]["read_only"])  # type: ignore[index]
        assert loaded(rig.client, chain) == 0
        assert rig.count("read_blocks_total", "nvme", Outcome.MISS.value) > 0
        put_all(rig.client, chain)
        assert loaded(rig.client, chain) == 3
        report = rig.client.flush("nvme", timeout_s=3600.0).result(PATIENCE_S)
        assert report.failed == report.wanted > 0
    with live(8, nvme=path) as rig:
        assert put(rig.client, chain_of(rig.namespace(), 3)).stored == 3
        rig.flush("nvme")


def test_d22_a_removed_segment_is_noticed_and_its_blocks_are_stored_again(tmp_path: Path) -> None:
    path = tmp_path / "nvme"
    with live(8, nvme=path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        for file in path.glob("segment-*"):
            file.unlink()
        rig.clock.advance(LOOK_EVERY_S)
        rig.store.upkeep.make_rounds()
        rig.settle()
        assert rig.store.edges[1].tier.usage().writable
        for there in range(4):  # what lies behind a hole is not read, so each load finds one hole more
            assert loaded(rig.client, chain) == there
            rig.settle()
            put_all(rig.client, chain)
            rig.flush("nvme")
            rig.client.evict("host")
        faults.assert_nothing_left(rig.store, nvme=path)
    with live(8, nvme=path) as rig:
        assert loaded(rig.client, chain_of(rig.namespace(), 3)) == 3
