"""The parts of the vLLM connector that need no vLLM: questions to the store, options, adapters."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.client_support import BLOCK_TOKENS, Live, chain_of, live, put, put_all
from tests.valkey_server import eventually
from tierkv.engines.vllm_adapters import Adapters, AdapterUse
from tierkv.engines.vllm_asking import Asking, Purpose, Question
from tierkv.engines.vllm_options import check_hashes, options_of, wishes_of
from tierkv.errors import ConfigError
from tierkv.executor import ThreadExecutor
from tierkv.keys import Chain
from tierkv.retention import Retention

PATIENCE_S = 20.0


@pytest.mark.parametrize(("age_s", "budget_s"), [(0.0, 0.005), (0.012, 0.012), (60.0, 0.02)])
def test_where_nothing_computes_a_step_waits_as_long_as_was_waited_already(
    monkeypatch: pytest.MonkeyPatch, age_s: float, budget_s: float
) -> None:
    question = Question("request", [], 0, None, 1.0)
    monkeypatch.setattr(time, "monotonic", lambda: question.asked_s + age_s)
    assert question.idle_budget_s() == pytest.approx(budget_s)


@contextmanager
def asking(rig: Live, chain: Chain | None, gate: threading.Event | None = None) -> Iterator[Asking]:
    """All questions are about ``chain``; with a gate they are named when it is opened."""

    def name(question: Question) -> Chain | None:
        if gate is not None:
            assert gate.wait(PATIENCE_S)
        return chain

    executor = ThreadExecutor(rig.client.clock)
    try:
        yield Asking(rig.client, executor, name, grace_s=0.05)
    finally:
        executor.close(5.0)


def question(chain: Chain, timeout_s: float = PATIENCE_S, **options: object) -> Question:
    return Question("request", list(chain.hashes), chain.num_tokens, None, timeout_s, **options)  # type: ignore[arg-type]


def leases(rig: Live) -> int:
    found = rig.client.stats()["leases"]
    assert isinstance(found, int)
    return found


@pytest.mark.usefixtures("face")
def test_d15_a_question_is_answered_with_a_lease_and_gives_it_back() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        with asking(rig, chain) as asks:
            asked = question(chain)
            asks.ask(asked)
            assert asks.look(asked, PATIENCE_S)
            assert asked.lease is not None
            assert asked.lease.tokens == 3 * BLOCK_TOKENS
            assert leases(rig) == 1
            asks.give_up(asked)
            eventually(lambda: not leases(rig), "the lease is back")


@pytest.mark.usefixtures("face")
def test_d13_an_answer_to_a_question_that_was_given_up_is_given_back() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        gate = threading.Event()
        with asking(rig, chain, gate) as asks:
            before, after = question(chain), question(chain)
            asks.ask(before)
            assert not asks.look(before, 0.0)
            asks.give_up(before)
            gate.set()
            asks.ask(after)
            assert asks.look(after, PATIENCE_S)
            eventually(lambda: leases(rig) == 1, "only the second has one")
            assert before.lease is None
            asks.give_up(after)
            asks.give_up(after)
            eventually(lambda: not leases(rig), "the lease is back")


@pytest.mark.usefixtures("face")
@pytest.mark.parametrize("purpose", [Purpose.BRING, Purpose.NAME])
def test_d15_other_questions_hold_nothing(purpose: Purpose) -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        with asking(rig, chain) as asks:
            asked = question(chain, purpose=purpose)
            asks.ask(asked)
            assert asks.look(asked, PATIENCE_S)
            assert asked.lease is None
            assert not leases(rig)


def test_d16_a_question_that_cannot_be_asked_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many are asked at a time, and the next is a miss."""
    with live() as rig:
        chain = chain_of(rig.namespace(), 3)
        with asking(rig, chain) as asks:
            asked = question(chain)
            with monkeypatch.context() as broken:
                broken.setattr(asks._executor, "run", _fail)
                with pytest.raises(RuntimeError):
                    asks.ask(asked)
            assert asked.answered
            assert asks._open == 0


def _fail(*_: object) -> None:
    raise RuntimeError("a bug")


@pytest.mark.usefixtures("face")
def test_what_has_no_name_is_a_miss() -> None:
    with live() as rig, asking(rig, None) as asks:
        asked = question(chain_of(rig.namespace(), 3))
        asks.ask(asked)
        assert asks.look(asked, PATIENCE_S)
        assert asked.lease is None


@pytest.mark.usefixtures("face")
def test_a_question_waits_for_blocks_that_another_announces() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 3)
        with asking(rig, chain) as asks:
            waits = question(chain, watch_s=PATIENCE_S)
            announces = question(chain, purpose=Purpose.NAME, announce_s=PATIENCE_S)
            asks.ask(announces)
            assert asks.look(announces, PATIENCE_S)
            assert announces.announcement is not None
            asks.ask(waits)
            put(rig.client, chain, 0, 2)
            assert not asks.look(waits, 0.2), "two of three are there"
            put(rig.client, chain, 2, 1)
            assert asks.look(waits, PATIENCE_S)
            assert waits.lease is not None
            assert len(waits.lease) == 3
            asks.give_up(waits)


@pytest.mark.usefixtures("face")
def test_a_question_takes_what_is_there_when_the_other_has_given_up() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 3)
        with asking(rig, chain) as asks:
            announcement = rig.client.announce(chain)
            waits = question(chain, watch_s=PATIENCE_S)
            asks.ask(waits)
            put(rig.client, chain, 0, 2)
            asks.cancel(announcement)
            assert asks.look(waits, PATIENCE_S)
            assert waits.lease is not None
            assert len(waits.lease) == 2
            asks.give_up(waits)


@pytest.mark.usefixtures("face")
def test_a_question_looks_again_for_what_nobody_announces() -> None:
    """Another host may be writing it."""
    with live() as rig:
        chain = chain_of(rig.namespace(), 3)
        with asking(rig, chain) as asks:
            waits = question(chain, watch_s=PATIENCE_S)
            asks.ask(waits)
            assert not asks.look(waits, 0.2)
            put_all(rig.client, chain)
            assert asks.look(waits, PATIENCE_S)
            assert waits.lease is not None
            assert len(waits.lease) == 3
            asks.give_up(waits)


@pytest.mark.usefixtures("face")
def test_a_question_stops_looking_at_its_time() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 3)
        with asking(rig, chain) as asks:
            begun_s = time.monotonic()
            waits = question(chain, timeout_s=0.3, watch_s=0.3)
            asks.ask(waits)
            assert asks.look(waits, PATIENCE_S)
            assert waits.lease is None
            assert time.monotonic() - begun_s < 10


# ---- options


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"colour": "red"}, "colour"),
        ({"load_timeout_s": "soon"}, "load_timeout_s"),
        ({"load_timeout_s": 0}, "load_timeout_s"),
        ({"block_tokens": 1.5}, "block_tokens"),
        ({"save_budget": 2}, "save_budget"),
        ({"socket": "unix:///run/t.sock", "host_capacity": "1 GiB"}, "host_capacity"),
    ],
)
def test_d29_options_that_make_no_sense_are_refused_by_name(extra: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        options_of(extra, producer=True, consumer=True)


def test_options_are_the_connectors_own_or_settings_of_the_store() -> None:
    options = options_of({"host_capacity": "8 GiB", "load_timeout_s": 1}, producer=True, consumer=False)
    assert (options.settings, options.load_timeout_s) == ({"host_capacity": "8 GiB"}, 1)
    assert (options.save, options.load) == (True, False)


@pytest.mark.parametrize(
    "extra", [{"socket": "unix:///run/t.sock"}, {"nvme_path": "/x"}, {"valkey_url": "embedded"}]
)
def test_d5_weak_hashes_are_refused_where_others_could_meet_them(extra: dict[str, object]) -> None:
    options = options_of(extra, producer=True, consumer=True)
    with pytest.raises(ConfigError, match="sha256_cbor"):
        check_hashes("xxhash", options)
    check_hashes("sha256", options)
    check_hashes("xxhash", options_of({}, producer=True, consumer=True))


def test_wishes_of_a_request() -> None:
    said = {
        "tierkv": {"priority": 3, "ttl_s": 60, "no_load": True, "timeout_s": 1},
        "do_remote_prefill": True,
    }
    wishes = wishes_of(said)
    assert wishes.retention == Retention(priority=3, ttl_s=60)
    assert (wishes.load, wishes.timeout_s, wishes.watch, wishes.announce) == (False, 1, True, False)
    for wrong in (
        {"tierkv": 3},
        {"tierkv": {"colour": 1}},
        {"tierkv": {"timeout_s": "x"}},
        {"tierkv": {"timeout_s": float("inf")}},
        {"tierkv": {"timeout_s": float("nan")}},
        {"tierkv": {"timeout_s": 1e6}},
        {"tierkv": {"ttl_s": -1}},
    ):
        with pytest.raises(ConfigError):
            wishes_of(wrong)


# ---- adapters


def write(folder: Path, content: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return str(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_d2_an_adapter_that_was_changed_in_place_is_another_one(tmp_path: Path) -> None:
    path = write(tmp_path / "one", b"first")
    adapters = Adapters()
    first, changed = adapters.of(AdapterUse("one", path, 1, reloads=False))
    assert first.revision is not None
    assert not changed
    write(tmp_path / "one", b"second!")
    untold, changed = adapters.of(AdapterUse("one", path, 1, reloads=False))
    assert untold.revision is None, "nobody knows which of the two the engine computes with"
    renewed, changed = adapters.of(AdapterUse("one", path, 1, reloads=True))
    assert renewed.revision not in (None, first.revision)
    assert changed
    assert adapters.of(AdapterUse("one", path, 1, reloads=False))[0] == renewed


def test_d2_an_adapter_that_was_changed_in_place_with_its_size_and_time_is_noticed(tmp_path: Path) -> None:
    """Adapters of one rank have one size, and archives and images set all times to a constant."""
    adapters = Adapters()
    for content in (b"first", b"other"):
        path = write(tmp_path / "one", content)
        os.utime(tmp_path / "one" / "adapter_model.safetensors", (0, 0))
        found, _ = adapters.of(AdapterUse("one", path, 1, reloads=False))
    assert found.revision is None


def test_an_adapter_whose_files_were_only_touched_is_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "one", b"first")
    adapters = Adapters()
    first, _ = adapters.of(AdapterUse("one", path, 1, reloads=False))
    write(tmp_path / "one", b"first")
    os.utime(tmp_path / "one" / "adapter_model.safetensors", (0, 0))
    again, changed = adapters.of(AdapterUse("one", path, 1, reloads=False))
    assert again == first
    assert first.revision is not None
    assert not changed


def test_d1_adapters_differ_by_name_and_content(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", b"alike"), write(tmp_path / "two", b"alike")
    other = write(tmp_path / "other", b"other")
    found = {
        Adapters().of(AdapterUse(name, path, 1, reloads=False))[0]
        for name, path in (("a", one), ("b", two), ("a", other))
    }
    assert len(found) == 3
    assert Adapters().of(AdapterUse("a", str(tmp_path / "nowhere"), 1, reloads=False))[0].revision is None
