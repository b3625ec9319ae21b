"""The model with a store behind it, in the process that computes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierkv.assembly import open_store
from tierkv.client import Client
from tierkv.clock import Clock, SystemClock
from tierkv.demo.answers import Answer, Flushed, Layers, Opened, Say
from tierkv.demo.questions import MAX_NEW_TOKENS, Reading
from tierkv.digest import default_cache_folder, weights_from_path
from tierkv.engines.transformers import Connector
from tierkv.errors import ClosedError
from tierkv.keys import Chain, Weights

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOADER = "tierkv.demo.engine:load"
"""Where the demo's model comes from."""

GREEDY: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False}
_LOAD_S = 30.0
_STORE_S = 60.0
_CLEAR_S = 20.0


@dataclass(frozen=True)
class Loaded:
    """A model that can be asked."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    weights: Weights
    block_tokens: int | None = None
    """``None``: the connector chooses."""


def load(say: Say) -> Loaded:
    """The demo's own model."""
    from tierkv.demo.model import load_model

    found = load_model(say)
    say("taking a digest of the weights")
    return Loaded(
        found.model, found.tokenizer, weights_from_path(found.folder, cache_folder=default_cache_folder())
    )


class LocalEngine:
    """An ``Engine`` in this process. One thread uses it."""

    def __init__(self, loaded: Loaded, layers: Layers, clock: Clock | None = None) -> None:
        self._model, self._tokenizer = loaded.model, loaded.tokenizer
        self._weights, self._block_tokens = loaded.weights, loaded.block_tokens
        self._layers = layers
        self._clock = clock or SystemClock()
        self._client: Client | None = None
        self._connector: Connector | None = None
        self._chain: Chain | None = None

    @property
    def pid(self) -> int:
        return os.getpid()

    # -- the store ------------------------------------------------------------------------------------------------

    def open(self, salt: str, settings: Mapping[str, Any]) -> Opened:
        client = open_store(owner="demo", **settings)
        self._client = client
        self._connector = Connector(
            client,
            self._model,
            self._weights,
            salt=salt,
            block_tokens=self._block_tokens,
            load_timeout_s=_LOAD_S,
        )
        found = client.store.edges[client.store.tier_number("nvme")].tier.usage().blocks
        return Opened(self._connector.block_tokens, self._connector.shape.token_bytes, found)

    def flush(self, tier: str, timeout_s: float) -> Flushed:
        report = self._opened.flush(tier, timeout_s=timeout_s).result(2 * timeout_s)
        return Flushed(report.written, report.failed)

    def evict(self, tier: str) -> int:
        return self._opened.evict(tier).evicted

    def settle(self, timeout_s: float) -> bool:
        store = self._opened.store
        return store.executor.wait_until(store.reaper.idle, timeout_s)

    def counters(self) -> Mapping[str, int]:
        return {"/".join(labels): value for labels, value in self._opened.store.counters.snapshot().items()}

    def kill(self) -> int:
        raise NotImplementedError("whoever wants to kill an engine gives it a process of its own")

    def close(self, *, forget: bool) -> None:
        client, self._client, self._connector = self._client, None, None
        if client is None:
            return
        with client:
            if forget and self._chain is not None:
                client.clear(namespace=self._chain.namespace, timeout_s=_CLEAR_S).result(2 * _CLEAR_S)

    @property
    def _opened(self) -> Client:
        if self._client is None:
            raise ClosedError("the demo's store is not open")
        return self._client

    # -- the model ------------------------------------------------------------------------------------------------

    def shared_tokens(self, file: str, questions: tuple[str, ...]) -> int:
        assert self._connector is not None
        prompts = [self._prompt(file, question)[0].tolist() for question in questions]
        same = 0
        for column in zip(*prompts, strict=False):
            if len(set(column)) > 1:
                break
            same += 1
        return same // self._connector.block_tokens * self._connector.block_tokens

    def compute(self, file: str, question: str) -> Answer:
        prompt = self._prompt(file, question)
        start_s = self._clock.now_s()
        first = _FirstToken(self._clock)
        with watched(self._model, self._layers):
            output = self._model.generate(
                prompt,
                attention_mask=prompt.new_ones(prompt.shape),
                stopping_criteria=_list_of(first),
                **GREEDY,
            )
        end_s = self._clock.now_s()
        tokens = output[0].tolist()[prompt.shape[1] :]
        return Answer(
            question,
            self._text(tokens),
            tuple(tokens),
            prompt.shape[1],
            first_token_s=(first.at_s or end_s) - start_s,
            whole_s=end_s - start_s,
        )

    def ask(self, file: str, question: str) -> Answer:
        assert self._connector is not None
        prompt = self._prompt(file, question)
        self._chain = self._connector.chain(prompt[0].tolist())
        known = self._opened.match(self._chain)
        before = self.counters()
        start_s = self._clock.now_s()
        with watched(self._model, self._layers):
            made = self._connector.generate(prompt, **GREEDY)
        end_s = self._clock.now_s()
        read = self._since(before, "read_blocks_total", "done")
        made.stored.result(_STORE_S)
        tokens = made.tokens[prompt.shape[1] :]
        return Answer(
            question,
            self._text(tokens),
            tokens,
            prompt.shape[1],
            first_token_s=made.first_token_s,
            whole_s=end_s - start_s,
            reused_tokens=made.reused_tokens,
            reused_bytes=made.reused_bytes,
            restore_s=made.restore_s,
            known_tokens=known.tokens,
            known=dict(known.tiers),
            known_blocks=known.blocks,
            read=read,
            no_room_blocks=self._since(before, "load_cut_total").get("no_room", 0),
            uncacheable=made.uncacheable,
        )

    def _since(self, before: Mapping[str, int], name: str, *rest: str) -> dict[str, int]:
        """How much a counter has grown, by the label behind its name."""
        grown = {}
        for labels, value in self._opened.store.counters.snapshot().items():
            more = value - before.get("/".join(labels), 0)
            if labels[0] == name and labels[2:] == rest and more:
                grown[labels[1]] = more
        return grown

    def _prompt(self, file: str, question: str) -> Tensor:
        return Reading(file, file, (question,)).prompt(self._tokenizer, question)

    def _text(self, tokens: Any) -> str:
        return " ".join(str(self._tokenizer.decode(tokens, skip_special_tokens=True)).split())


class _FirstToken:
    """A stopping criterion that never stops and notes when it is first asked: after the first token."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at_s: float | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if self.at_s is None:
            self.at_s = self._clock.now_s()
        return input_ids.new_zeros(input_ids.shape[0]).bool()


def _list_of(criterion: _FirstToken) -> Any:
    from transformers import StoppingCriteriaList

    return StoppingCriteriaList([criterion])


@contextmanager
def watched(model: Any, layers: Layers) -> Iterator[None]:
    """Tells how many layers a prompt has passed. Single tokens are not worth a word."""
    stack = getattr(getattr(model, "model", None), "layers", ())

    def passed(number: int) -> Any:
        def hook(_module: Any, inputs: Any, _output: Any) -> None:
            if inputs and inputs[0].shape[1] > 1:
                layers(number, len(stack))

        return hook

    hooks = [layer.register_forward_hook(passed(number)) for number, layer in enumerate(stack, start=1)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
