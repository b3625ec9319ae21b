"""Who waits is interrupted or cancelled, or a callback raises: nothing is left over, and nobody else pays."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.client_support import (
    EMBEDDED,
    PATIENCE_S,
    Gate,
    Live,
    chain_of,
    live,
    loaded,
    payloads_of,
    put_all,
)
from tests.valkey_server import eventually
from tierkv.daemon.link import Line
from tierkv.executor import deliver
from tierkv.handles import Lease
from tierkv.keys import Chain

pytestmark = pytest.mark.usefixtures("face")


def cold_chain(rig: Live, blocks: int = 3) -> Chain:
    """One that only NVMe holds."""
    chain = chain_of(rig.namespace(), blocks)
    put_all(rig.client, chain)
    rig.flush("nvme")
    rig.client.evict("host")
    return chain


def nothing_is_leased(rig: Live) -> None:
    rig.settle()
    eventually(lambda: rig.client.stats()["leases"] == 0, "the lease that nobody took is released")


# ---- Ctrl-C, or a signal handler that raises


def interrupt_waits(monkeypatch: pytest.MonkeyPatch, face: str, *, early: bool) -> None:
    """Whoever waits in this thread, for a future or for the daemon, is interrupted once: before the answer, or when it
    is there already."""
    kind, name = (Future, "result") if face == EMBEDDED else (Line, "receive")
    original, mine, left = getattr(kind, name), threading.current_thread(), [1]

    def interrupted(self: Any, *arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not mine or not left:
            return original(self, *arguments, **options)
        left.pop()
        if not early:
            original(self, *arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(kind, name, interrupted)


@pytest.mark.parametrize("early", [True, False], ids=["before the answer", "with the answer there"])
def test_d15_a_load_that_is_interrupted_leaves_no_lease(
    tmp_path: Path, face: str, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(8, nvme=tmp_path) as rig:
        chain = cold_chain(rig)
        interrupt_waits(monkeypatch, face, early=early)
        with pytest.raises(KeyboardInterrupt):
            rig.client.load(chain)
        nothing_is_leased(rig)
        assert loaded(rig.client, chain) == 3


@pytest.mark.parametrize("early", [True, False], ids=["before the answer", "with the answer there"])
def test_d15_a_put_that_is_interrupted_leaves_no_slots(
    face: str, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if face == EMBEDDED:
        pytest.skip("a put waits for nobody there")
    with live(4) as rig:
        chain = chain_of(rig.namespace(), 3)
        payloads = payloads_of(chain)
        free_bytes = rig.store.host.free_bytes()
        interrupt_waits(monkeypatch, face, early=early)
        with pytest.raises(KeyboardInterrupt):
            rig.client.put(chain, payloads)
        eventually(lambda: rig.store.host.free_bytes() == free_bytes, "the slots are free again")
        assert rig.client.put(chain, payloads).stored == 3


# ---- coroutines that are cancelled


def cancelled(verb: Callable[[], Any], ready: Callable[[], None]) -> None:
    """Begins it, cancels it when ``ready`` returns (the loop stands still meanwhile)."""

    async def main() -> None:
        task = asyncio.ensure_future(verb())
        await asyncio.sleep(0)
        ready()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_d15_a_coroutine_cancelled_before_its_lease_comes_keeps_none(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path) as rig:
        chain = cold_chain(rig)
        gate = Gate("get_into")
        rig.tiers["nvme"].before = gate
        cancelled(lambda: rig.client.aio.load(chain), gate.reached)
        gate.open()
        nothing_is_leased(rig)


def test_d15_a_coroutine_cancelled_when_its_lease_is_there_keeps_none() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)

        def is_leased() -> None:
            eventually(lambda: rig.store.stats()["leases"] == 1, "the lease is there")

        cancelled(lambda: rig.client.aio.load(chain), is_leased)
        nothing_is_leased(rig)


def others(rig: Live) -> int:
    """Announcements and watches that the store knows of."""
    stats = rig.store.board.stats()
    return stats["announcements"] + stats["watches"]


@pytest.mark.parametrize("verb", ["announce", "watch"])
def test_a_coroutine_cancelled_while_a_thread_makes_the_call_leaves_nothing(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 2)
        kept = rig.client.announce(chain)
        called, go_on, original = threading.Event(), threading.Event(), getattr(rig.client, verb)

        def slow(*arguments: Any, **options: Any) -> Any:
            called.set()
            assert go_on.wait(PATIENCE_S)
            return original(*arguments, **options)

        monkeypatch.setattr(rig.client, verb, slow)

        def go_on_when_cancelled() -> None:
            assert called.wait(PATIENCE_S)
            threading.Timer(0.0, go_on.set).start()

        cancelled(lambda: getattr(rig.client.aio, verb)(chain), go_on_when_cancelled)
        assert go_on.wait(PATIENCE_S)
        eventually(lambda: others(rig) == 1, "only the first announcement is left")
        kept.cancel()


# ---- callbacks that raise


class Odd(BaseException):
    """No ``Exception``, like what asyncio, trio and pytest raise to end things."""


ERRORS = [asyncio.CancelledError(), GeneratorExit(), SystemExit(1), KeyboardInterrupt(), Odd(), ValueError()]


def name_of(error: BaseException) -> str:
    return type(error).__name__


@pytest.mark.embedded_only
@pytest.mark.parametrize("error", ERRORS, ids=name_of)
def test_d13_a_callback_that_raises_holds_nobody_else_up(tmp_path: Path, error: BaseException) -> None:
    with live(8, nvme=tmp_path, load_deadline_s=10 * PATIENCE_S) as rig:
        chain = cold_chain(rig)
        gate = Gate("get_into")
        rig.tiers["nvme"].before = gate
        loads = [rig.client.load_async(chain) for _ in range(3)]
        gate.reached()

        def broken(_: Future[Lease]) -> None:
            raise error

        loads[0].add_done_callback(broken)
        gate.open()
        for load in loads:
            with load.result(PATIENCE_S) as lease:
                assert len(lease) == 3
        nothing_is_leased(rig)
        assert rig.client.stats()["threads"] == {"restarted": {}, "stuck_s": {}}


def test_a_real_interrupt_in_a_callback_is_the_callers() -> None:
    future: Future[int] = Future()

    def broken(_: Future[int]) -> None:
        raise KeyboardInterrupt

    future.add_done_callback(broken)
    with pytest.raises(KeyboardInterrupt):  # this is the main thread
        deliver(future, 1)
    assert future.result() == 1
