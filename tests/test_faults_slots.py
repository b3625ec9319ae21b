"""Host RAM that gives no slot at the n-th call, and copies that fail, hang, end late or end twice."""

from __future__ import annotations

import pytest

from tests.client_support import PATIENCE_S, Live, chain_of, live, loaded, put, put_all
from tests.test_copier_engines import simple
from tierkv.arena import Arena
from tierkv.copier import Copier, HostCopier
from tierkv.executor import ThreadExecutor
from tierkv.testing import faults
from tierkv.testing.faults import FaultyCopier, FaultyHost, Strike
from tierkv.units import KIB


def test_d16_a_refused_reservation_returns_nothing_and_the_next_one_everything() -> None:
    host = FaultyHost(Arena(64 * KIB, 64 * KIB), Strike(2, "reserve"))
    first = host.reserve(2, 4096)
    assert first is not None
    assert host.reserve(2, 4096) is None
    again = host.reserve(2, 4096)
    assert again is not None
    host.release([*first, *again])
    assert host.arena.used_bytes == 0
    host.close()


def test_d16_the_nth_reservation_of_a_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused is dropped or cut and counted, never an exception; the next time there is room."""
    for strike in faults.each_call("reserve"):
        made: list[FaultyHost] = []

        def host(arena: Arena, strike: Strike = strike, made: list[FaultyHost] = made) -> FaultyHost:
            made.append(FaultyHost(arena, strike))
            return made[-1]

        with monkeypatch.context() as patch, live_on(patch, host) as rig:  # type: ignore[attr-defined]
            chain = chain_of(rig.namespace(), 3)
            stored = put(rig.client, chain)
            assert stored.stored + sum(stored.dropped.values()) == 3
            strike.heal()
            put_all(rig.client, chain)
            assert loaded(rig.client, chain) == 3
            faults.assert_nothing_left(rig.store)


def live_on(patch: pytest.MonkeyPatch, host: object) -> object:
    patch.setattr("tests.client_support.HostTier", host)
    return live(4)


@pytest.mark.parametrize("way", FaultyCopier.WAYS)
@pytest.mark.parametrize("call", ["offload", "onboard"])
def test_d9_d10_d13_a_copy_goes_wrong(way: str, call: str) -> None:
    copiers: list[FaultyCopier] = []

    def copier(executor: ThreadExecutor) -> Copier:
        copiers.append(FaultyCopier(HostCopier(executor), Strike(1, call), way))
        return copiers[-1]

    with live(8, copier=copier) as rig:
        _offload_and_onboard(rig, copiers, way, call)
        faults.assert_nothing_left(rig.store)


def _offload_and_onboard(rig: Live, copiers: list[FaultyCopier], way: str, call: str) -> None:
    engine, chain, pages = simple(rig)
    engine.write(chain, pages)
    stored = rig.client.offload(engine.kv, pages, chain)
    if call == "offload" and way in ("hang", "late"):
        assert not stored.done()
        assert rig.client.match(chain).blocks == 0, "what is not copied is not seen"
        faults.leftovers.wait_until(lambda: copiers[0].held, "the copy is held back")
        copiers[0].release()
    wrong = call == "offload" and way == "error"
    assert stored.result(PATIENCE_S).stored == (0 if wrong else len(chain))
    if wrong:
        assert rig.client.offload(engine.kv, pages, chain).result(PATIENCE_S).stored == len(chain)
    with rig.client.load(chain) as lease:
        copied = rig.client.onboard(lease, engine.kv, pages)
        if call == "onboard" and way in ("hang", "late"):
            faults.leftovers.wait_until(lambda: copiers[0].held, "the copy is held back")
            assert not copied.done()
            copiers[0].release()
        assert copied.result(PATIENCE_S) == (call != "onboard" or way != "error")
    if way == "twice":
        faults.leftovers.wait_until(
            lambda: rig.count("stray_completions_total", call) == 1, "the second end is counted"
        )
