"""``announce`` and ``watch``: who wants blocks that another is about to store learns at once what becomes of them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Any

import pytest

from tests.client_support import PATIENCE_S, chain_of, live, loaded, put, put_all
from tests.valkey_server import eventually
from tierkv.announcing import Board
from tierkv.errors import ArgumentError, ClosedError, HandleError, IdentityError
from tierkv.keys import Chain
from tierkv.watching import Watched

pytestmark = pytest.mark.usefixtures("face")


def outcome(future: Future[Watched]) -> tuple[str, int]:
    watched = future.result(PATIENCE_S)
    return watched.end, watched.match.blocks


def waits(future: Future[Watched], board: Board) -> None:
    """Returns when the watch stands at its block."""
    eventually(lambda: board.stats()["watches"] > 0, "it is known")
    assert not future.done()


def at_rest(board: Board) -> None:
    eventually(
        lambda: board.stats() == {"announcements": 0, "announced_blocks": 0, "watches": 0}, "nobody waits"
    )
    assert not board._awaited


def test_what_is_there_is_told_at_once() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        future = rig.client.watch(chain)
        assert future.done()
        watched = future.result()
        assert (watched.end, watched.match.blocks) == ("there", 3)
        assert watched.match.tokens == 3 * chain.namespace.layout.block_tokens
        assert loaded(rig.client, chain) == 3
        assert rig.count("watches_total", "there") == 1
        at_rest(rig.store.board)


def test_what_nobody_has_announced_is_told_at_once() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 3)
        put(rig.client, chain, count=1)
        future = rig.client.watch(chain)
        assert future.done()
        assert outcome(future) == ("unannounced", 1)
        assert outcome(rig.client.watch(chain, count=1)) == ("there", 1)
        assert outcome(rig.client.watch(chain, count=0))[0] == "there"
        at_rest(rig.store.board)


def test_blocks_that_come_one_by_one_and_out_of_order() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 4)
        rig.client.announce(chain)
        future = rig.client.watch(chain)
        for position in range(4):
            waits(future, rig.store.board)
            put(rig.client, chain, first=position, count=1)
        assert outcome(future) == ("there", 4)
        at_rest(rig.store.board)
        assert rig.count("announcements_total", "there") == 1


def test_who_gives_up_is_noticed_at_once() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 4)
        announcement = rig.client.announce(chain)
        assert announcement.accepted
        future = rig.client.watch(chain)
        put(rig.client, chain, count=2)
        waits(future, rig.store.board)
        announcement.cancel()
        assert outcome(future) == ("abandoned", 2)
        announcement.cancel()
        at_rest(rig.store.board)


def test_the_end_of_a_with_block_abandons_what_was_not_stored() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 2)
        with rig.client.announce(chain):
            future = rig.client.watch(chain)
            put(rig.client, chain, count=1)
        assert outcome(future) == ("abandoned", 1)
        with rig.client.announce(chain):
            put_all(rig.client, chain)
        assert outcome(rig.client.watch(chain)) == ("there", 2)


def test_of_two_who_announce_the_same_one_may_give_up() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 2)
        first = rig.client.announce(chain)
        second = rig.client.announce(chain, first=0, count=1)
        future = rig.client.watch(chain, count=1)
        waits(future, rig.store.board)
        first.cancel()
        eventually(lambda: rig.store.board.stats()["announcements"] == 1, "one has given up")
        assert not future.done()
        second.cancel()
        assert outcome(future) == ("abandoned", 0)


def test_the_announcement_may_come_within_the_grace() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 2)
        future = rig.client.watch(chain, grace_s=PATIENCE_S)
        waits(future, rig.store.board)
        announcement = rig.client.announce(chain)
        put(rig.client, chain, count=1)
        announcement.cancel()
        assert outcome(future) == ("abandoned", 1)


def test_blocks_may_come_within_the_grace_without_an_announcement() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 2)
        future = rig.client.watch(chain, grace_s=PATIENCE_S)
        waits(future, rig.store.board)
        put_all(rig.client, chain)
        assert outcome(future) == ("there", 2)


def test_the_grace_ends() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 2)
        assert outcome(rig.client.watch(chain, grace_s=0.01)) == ("unannounced", 0)
        at_rest(rig.store.board)


def test_each_has_a_deadline() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 2)
        announcement = rig.client.announce(chain)
        assert outcome(rig.client.watch(chain, timeout_s=0.01)) == ("late", 0)
        announcement.cancel()
        rig.client.announce(chain, timeout_s=0.01)
        future = rig.client.watch(chain, grace_s=1e-9)  # the announcement may be over before this is asked
        assert outcome(future)[0] in ("abandoned", "unannounced")
        at_rest(rig.store.board)
        assert rig.count("announcements_total", "late") == 1


def test_a_watch_that_nobody_wants_any_more() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 2)
        announcement = rig.client.announce(chain)
        future = rig.client.watch(chain)
        waits(future, rig.store.board)
        assert future.cancel()
        eventually(lambda: rig.store.board.stats()["watches"] == 0, "the watch has ended")
        announcement.cancel()
        at_rest(rig.store.board)


def test_what_was_there_and_has_left_is_waited_for_again() -> None:
    """All blocks must be usable at the same time."""
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 2)
        put(rig.client, chain, count=1)
        announcement = rig.client.announce(chain, first=1, count=1)
        future = rig.client.watch(chain)
        waits(future, rig.store.board)
        rig.client.clear().result(PATIENCE_S)
        put(rig.client, chain, count=1)
        put(rig.client, chain, first=1, count=1)
        assert outcome(future) == ("there", 2)
        announcement.cancel()
        at_rest(rig.store.board)


def test_blocks_that_a_colder_tier_brings_back_count(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 2)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        assert outcome(rig.client.watch(chain)) == ("there", 2)


def test_many_watch_the_same_and_all_are_told() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 2)
        announcement = rig.client.announce(chain)
        futures = [rig.client.watch(chain) for _ in range(200)]
        eventually(lambda: rig.store.board.stats()["watches"] == 200, "all wait")
        put_all(rig.client, chain)
        assert {outcome(future) for future in futures} == {("there", 2)}
        announcement.cancel()
        at_rest(rig.store.board)


def test_announcing_and_watching_from_many_threads() -> None:
    with live(64) as rig:
        space = rig.namespace()
        wrong: list[Any] = []

        def produce(chain: Chain) -> None:
            with rig.client.announce(chain):
                for position in range(4):
                    put(rig.client, chain, first=position, count=1)

        def consume(chain: Chain) -> None:
            got = outcome(rig.client.watch(chain, grace_s=PATIENCE_S))
            if got != ("there", 4):
                wrong.append(got)

        chains = [chain_of(space, 4, seed) for seed in range(12)]
        threads = [
            threading.Thread(target=call, args=(chain,)) for chain in chains for call in (consume, produce)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not wrong
        at_rest(rig.store.board)


def test_the_end_of_a_client_abandons_all() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 2)
        rig.client.announce(chain)
        future = rig.client.watch(chain, timeout_s=PATIENCE_S)
        waits(future, rig.store.board)
        board = rig.store.board
        rig.client.close()
        assert future.result(PATIENCE_S).end in ("abandoned", "late")
        at_rest(board)
        with pytest.raises(ClosedError):
            rig.client.watch(chain)
        with pytest.raises(ClosedError):
            rig.client.announce(chain)


def test_coroutines() -> None:
    async def talk(client: Any, chain: Chain) -> list[str]:
        announcement = await client.aio.announce(chain)
        watch = asyncio.create_task(client.aio.watch(chain))
        put_all(client, chain)
        first = await watch
        announcement.cancel()
        return [first.end, (await client.aio.watch(chain)).end]

    with live(8) as rig:
        assert asyncio.run(talk(rig.client, chain_of(rig.namespace(), 2))) == ["there", "there"]


def test_too_many_are_refused_and_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.watching.MOST_ANNOUNCEMENTS", 2)
    monkeypatch.setattr("tierkv.watching.MOST_WATCHES", 2)
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 2)
        kept = [rig.client.announce(chain) for _ in range(2)]
        refused = rig.client.announce(chain)
        assert [one.accepted for one in (*kept, refused)] == [True, True, False]
        refused.cancel()
        waiting = [rig.client.watch(chain) for _ in range(2)]
        assert outcome(rig.client.watch(chain)) == ("late", 0)
        put_all(rig.client, chain)
        assert [outcome(future) for future in waiting] == [("there", 2)] * 2
        at_rest(rig.store.board)
        assert rig.client.announce(chain).accepted


def test_no_more_is_announced_than_the_store_can_know() -> None:
    with live(8, max_families=3) as rig:
        chain = chain_of(rig.namespace(), 4)
        assert not rig.client.announce(chain).accepted
        with rig.client.announce(chain, count=3) as announcement:
            assert announcement.accepted
            assert not rig.client.announce(chain_of(rig.namespace(), 1, seed=1)).accepted


def test_what_is_wrong_is_said() -> None:
    with live(8) as rig:
        space = rig.namespace()
        chain = chain_of(space, 2)
        for call in (
            lambda: rig.client.announce(chain, first=1, count=2),
            lambda: rig.client.announce(chain, first=-1),
            lambda: rig.client.watch(chain, count=3),
        ):
            with pytest.raises(HandleError, match="2 full blocks"):
                call()
        with pytest.raises(ArgumentError, match="grace_s"):
            rig.client.watch(chain, grace_s="soon")  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="timeout_s"):
            rig.client.announce(chain, timeout_s=float("nan"))
        with live(8) as other, pytest.raises(IdentityError):
            other.client.watch(chain)


def test_a_pending_watch_can_be_asked_with_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 2)
        with rig.client.announce(chain):
            future = rig.client.watch(chain)
            with pytest.raises(NotYet):
                future.result(0.0)
        assert outcome(future) == ("abandoned", 0)


def test_a_watch_whose_board_was_told_nothing_is_looked_at_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A board that is not told of arrivals answers by the deadline all the same."""
    monkeypatch.setattr(Board, "_came", lambda self, name: None)
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 2)
        rig.client.announce(chain)
        future = rig.client.watch(chain, timeout_s=0.05)
        waits(future, rig.store.board)
        eventually(lambda: rig.store.board._awaited, "it stands at its block")
        put_all(rig.client, chain)
        assert outcome(future)[0] == "there"  # at its deadline at the latest it is looked at


def test_a_look_at_a_long_prompt_asks_for_what_may_have_come_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a prompt whose blocks come one by one would be looked through as often as it has blocks."""
    with live(16) as rig:
        chain = chain_of(rig.namespace(), 5000)
        with rig.client.announce(chain):
            future = rig.client.watch(chain)
            eventually(lambda: rig.store.board._awaited, "it stands at its block")
            find, asked = rig.store.catalog.find_run, [0]

            def counted(space: Any, hashes: Any, state: int) -> Any:
                asked[0] += len(hashes)
                return find(space, hashes, state)

            monkeypatch.setattr(rig.store.catalog, "find_run", counted)
            for first in range(8):
                put(rig.client, chain, first, 1)
                name = (chain.namespace.digest, chain.hashes[first + 1])
                eventually(lambda name=name: name in rig.store.board._awaited, "it stands at the next")  # type: ignore[misc]
            assert asked[0] < 1000
        assert outcome(future)[0] == "abandoned"
