"""Hot blocks stand for the slots that they were copied from, and what fails under them neither hangs nor holds them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tierkv  # noqa: E402
from tests.transformers_support import BLOCK, model_of, prompt_of  # noqa: E402
from tierkv.client import Client  # noqa: E402
from tierkv.engines.hot_blocks import HotBlocks  # noqa: E402
from tierkv.engines.transformers import Connector  # noqa: E402
from tierkv.engines.transformers_canary import compare  # noqa: E402
from tierkv.errors import ArgumentError, ClosedError, HandleError  # noqa: E402
from tierkv.keys import Weights  # noqa: E402
from tierkv.units import MIB  # noqa: E402

GREEDY = {"max_new_tokens": 6, "do_sample": False}
PATIENCE_S = 20.0


@pytest.fixture
def client(tmp_path: Any) -> Iterator[Client]:
    with tierkv.open(
        host_capacity="8 MiB", nvme_path=str(tmp_path), nvme_capacity="64 MiB", nvme_min_free=0
    ) as opened:
        yield opened


@pytest.fixture
def connector(client: Client) -> Connector:
    model = copy.deepcopy(model_of("llama"))
    return Connector(client, model, Weights("revision", "t"), block_tokens=BLOCK, hbm_bytes=4 * MIB)


def generated(connector: Connector, prompt: Any) -> Any:
    made = connector.generate(prompt, **GREEDY)
    made.stored.result(PATIENCE_S)
    return made


def hot_of(connector: Connector) -> HotBlocks:
    assert connector.hot is not None
    return connector.hot


def made_hot(connector: Connector, prompt: Any) -> HotBlocks:
    for _ in range(3):
        generated(connector, prompt)
    assert len(hot_of(connector)) == 6
    return hot_of(connector)


def readers(hot: HotBlocks) -> int:
    return sum(block.readers for block in hot._by_id.values())


def test_d9_a_block_that_was_cleared_and_stored_anew_is_not_the_one_that_was_hot(
    client: Client, connector: Connector
) -> None:
    """The weights were changed in place, so the store was cleared: the names are the same, the numbers are not."""
    prompt = prompt_of(101)
    hot = made_hot(connector, prompt)
    with torch.no_grad():
        for weight in connector.model.parameters():
            weight.mul_(1.25)
    assert client.clear().result(PATIENCE_S)
    fresh = generated(connector, prompt)
    assert fresh.reused_tokens == 0
    for _ in range(4):
        again = generated(connector, prompt)
        assert (again.reused_tokens, again.tokens) == (96, fresh.tokens)
        assert compare(connector, prompt).worst < 1e-3
    assert len(hot) == 6
    assert hot.counts.promoted == 12


def test_a_block_that_came_back_into_host_ram_becomes_hot_again(client: Client, connector: Connector) -> None:
    prompt = prompt_of(101)
    hot = made_hot(connector, prompt)
    served, expected = hot.counts.served, generated(connector, prompt).tokens
    client.flush("nvme").result(PATIENCE_S)
    client.evict("host")
    assert [generated(connector, prompt).tokens for _ in range(3)] == [expected] * 3
    assert len(hot) == 6
    assert hot.counts.served == served + 3 * 6, "what left host RAM was served, or did not become hot again"
    assert (
        hot.tier.usage().used_bytes == 6 * hot.tier.tensor(next(iter(hot._by_id[1].slots.values()))).numel()
    )


def test_a_client_that_refuses_leaves_no_block_held(
    client: Client, connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(101)
    hot = made_hot(connector, prompt)

    def refused(*_: Any, **__: Any) -> Any:
        raise ClosedError("closed")

    monkeypatch.setattr(client, "onboard", refused)
    assert generated(connector, prompt).reused_tokens == 0
    assert readers(hot) == 0


@pytest.mark.parametrize("pages", [lambda i: [(i, i)], lambda i: [], lambda i: [(i,), (i,)]])
def test_pages_that_a_block_does_not_have_are_the_clients_to_refuse(
    client: Client, connector: Connector, pages: Callable[[int], Any]
) -> None:
    """A hot block has a layer begin where its pages say; so they must be as many as it has."""
    prompt = prompt_of(101)
    hot = made_hot(connector, prompt)
    kv = connector_pages(connector, 6)
    with client.load(connector.chain(prompt[0].tolist())) as lease:
        wrong = [pages(i) for i in range(6)]
        if len(wrong[0]) == 2:  # more groups than there are: nobody looks at them
            assert hot.onboard(client, lease, kv, wrong).result(PATIENCE_S)
        else:
            with pytest.raises((HandleError, ArgumentError)):
                hot.onboard(client, lease, kv, wrong)
    assert readers(hot) == 0


def connector_pages(connector: Connector, blocks: int) -> Any:
    from tierkv.engines.transformers_pages import blank_cache, pages_of

    cache = blank_cache(connector.model.config, connector.shape, blocks * BLOCK)
    return pages_of(cache, connector.shape, BLOCK)


@pytest.mark.parametrize("verb", ["onboard", "offload"])
def test_a_copier_that_was_closed_meanwhile_is_a_miss_and_nobody_waits_for_ever(
    client: Client, connector: Connector, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(101)
    for _ in range(2):
        generated(connector, prompt)
    hot = hot_of(connector)

    class Closed:
        def __getattr__(self, name: str) -> Any:
            return refused if name == verb else getattr(client.copier, name)

    def refused(*_: Any, **__: Any) -> None:
        raise ClosedError("the executor is closed")

    monkeypatch.setattr(hot, "_copier", Closed())
    kv = connector_pages(connector, 6)
    with client.load(connector.chain(prompt[0].tolist())) as lease:
        whole = hot.onboard(client, lease, kv, [[(i,)] for i in range(6)])
        assert whole.result(PATIENCE_S) is (verb == "offload")
    assert (readers(hot), len(hot), hot.tier.usage().used_bytes) == (0, 0, 0)
    monkeypatch.undo()
    assert generated(connector, prompt).reused_tokens == 96


def test_a_policy_that_raises_costs_nobody_the_answer(connector: Connector, client: Client) -> None:
    prompt = prompt_of(101)
    generated(connector, prompt)
    hot = hot_of(connector)

    def broken(*_: Any) -> Any:
        raise LookupError("a policy of somebody")

    hot._admission.admit = broken  # type: ignore[method-assign]
    kv = connector_pages(connector, 6)
    with client.load(connector.chain(prompt[0].tolist())) as lease:
        assert hot.onboard(client, lease, kv, [[(i,)] for i in range(6)]).result(PATIENCE_S)
