"""HuggingFace transformers: ``generate`` with a store behind it.

    connector = Connector(client, model, weights=weights_from_path(folder))
    result = connector.generate(input_ids, max_new_tokens=64)       # computes, and offloads the full blocks
    result = connector.generate(same_beginning, max_new_tokens=64)  # computes only what is new

What the store cannot give, the model computes. Prompts, options or models that cannot be cached are generated all the
same, without the store, and ``Generation.uncacheable`` says why.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tierkv.client import Client
from tierkv.codec import LOSSY
from tierkv.copier import PagedKV
from tierkv.engines.encoded_pages import PageCodec
from tierkv.engines.hot_blocks import HotBlocks, hot_blocks
from tierkv.engines.transformers_generate import Generated, check_options, generate_from
from tierkv.engines.transformers_pages import (
    blank_cache,
    block_tokens_for,
    computes_in,
    cut_cache,
    given,
    layout_of,
    new_cache,
    pages_of,
    settle,
    shape_of,
)
from tierkv.errors import ClosedError, ConfigError, IdentityError, LayoutError
from tierkv.executor import deliver
from tierkv.handles import Lease
from tierkv.intake import Stored
from tierkv.keys import Chain, Extras, NamespaceSpec, Weights
from tierkv.layout import Layout
from tierkv.namespaces import OpenNamespace
from tierkv.retention import KEEP, Retention

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

    from tierkv.daemon.remote import RemoteClient

log = logging.getLogger("tierkv")

ENGINE = "transformers"

NOT_ENCODED = "not_encoded"
"""Why blocks are not stored whose numbers the namespace's codec cannot hold (``Stored.dropped``)."""

LOSSY_BLOCK_TOKENS = 128
"""A scale for each channel costs less than two percent of a block from here on."""

# Fields of a configuration that say where a model came from, not what it computes.
_NAMES_ONLY = frozenset({"_name_or_path", "transformers_version", "architectures", "torch_dtype"})

# Kinds of rotary embedding whose angles depend on how long the whole prompt is.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True)
class Generation:
    """One call of ``Connector.generate``. Times are on the store's clock."""

    output: Any
    """What ``model.generate`` returned: token ids ``[1, tokens]``, or its output object."""
    tokens: tuple[int, ...]
    """The prompt and what was generated."""
    reused_tokens: int
    """Leading tokens of the prompt whose keys and values came from the store."""
    reused_bytes: int
    restore_s: float
    """To find, load and copy them."""
    first_token_s: float
    """From the call to the first new token, ``restore_s`` included."""
    stored: Future[Stored]
    """Done when the full blocks of prompt and output are in host RAM."""
    uncacheable: str | None = None
    """Why the store was left out."""


@dataclass(frozen=True)
class Restored:
    """A cache whose first ``tokens`` came from the store, ``bytes`` of them."""

    cache: DynamicCache
    tokens: int = 0
    bytes: int = 0


class Connector:
    """One model with a store. ``generate`` may be called from any thread that may call the model."""

    def __init__(
        self,
        client: Client | RemoteClient,
        model: PreTrainedModel,
        weights: Weights | Future[Weights],
        *,
        weights_epoch: int = 0,
        salt: str | None = None,
        block_tokens: int | None = None,
        load_timeout_s: float | None = None,
        retention: Retention = KEEP,
        lossy_codec: str | None = None,
        encode_at: Literal["edge", "device"] = "edge",
        hbm_bytes: int = 0,
    ) -> None:
        """Computes one token to learn the shape of the model's cache.

        ``weights`` names the tensors (``tierkv.weights_from_path``); while it is a future that is not done, nothing is
        reused or stored. ``block_tokens``: default the shortest whose parts are worth an I/O of their own.
        ``load_timeout_s``: how long a call waits for the colder tiers, default the store's. ``retention``: how prompts
        and outputs are kept where a call does not say so itself. ``lossy_codec``: an edge with this codec (``int8``,
        ``fp8_e4m3``: the store's ``nvme.codec`` or ``valkey.codec``) may make this model's blocks smaller at a loss,
        see ``docs/codecs.md``; they are then another namespace's, and 128 tokens long at least, unless
        ``block_tokens`` says otherwise, so that its scales cost little. ``encode_at="device"``: they are encoded with
        it where the model's tensors are, before they are copied, so host RAM too holds the smaller form. ``hbm_bytes``:
        so much device memory, taken at once, keeps blocks that are reused often (``tierkv.engines.hot_blocks``).

        Raises ``LayoutError`` for a cache that cannot be cut into blocks or that the store's copier cannot reach,
        ``IdentityError`` when keys depend on more than the tokens before them, ``ConfigError`` for a codec that is not
        lossy, ``encode_at="device"`` without one, ``hbm_bytes`` below one block (where they are not to be had, what
        torch raises) and a GPU without CuPy.
        """
        if lossy_codec is not None and lossy_codec not in LOSSY:
            raise ConfigError("lossy_codec", lossy_codec, f"it is one of {sorted(LOSSY)}, or None")
        self._client = client
        self.model = model
        self._weights = weights
        self._epoch, self._salt = weights_epoch, salt
        self._load_timeout_s = load_timeout_s
        self._retention = retention
        layout_id = layout_id_of(model.config)
        self.shape = shape_of(_one_token(model))
        self._computes_in = computes_in(model)
        shortest = LOSSY_BLOCK_TOKENS if lossy_codec is not None else 0
        self.block_tokens = block_tokens or max(block_tokens_for(self.shape), shortest)
        self._lossy_codec = lossy_codec
        self.layout = layout_of(self.shape, self.block_tokens, layout_id)
        sample = pages_of(
            blank_cache(model.config, self.shape, self.block_tokens, model.device),
            self.shape,
            self.block_tokens,
        )
        self.encoding: PageCodec | None = None
        """What encodes blocks where the model's tensors are."""
        if encode_at != "edge":
            self.encoding = _page_codec(self.layout, lossy_codec, encode_at)
            self.layout = self.encoding.layout
            sample = self.encoding.prepare(sample)
        client.copier.check(sample, self.layout)
        self.hot: HotBlocks | None = None
        """The blocks that are kept in the model's device memory."""
        if hbm_bytes:
            largest_bytes = max(part.payload_bytes for part in self.layout.parts)
            self.hot = hot_blocks(hbm_bytes, model.device, client.copier, slot_bytes=largest_bytes)
        self._space: OpenNamespace | None = None
        self._warned: set[str] = set()

    def generate(
        self,
        input_ids: Tensor,
        *,
        extras: Extras | None = None,
        retention: Retention | None = None,
        **options: Any,
    ) -> Generation:
        """``model.generate`` for one prompt ``[1, tokens]``, with the beginning of it taken from the store.

        ``extras`` names what changes keys and values beside the tokens (an adapter that is active in the model).
        ``retention``: how this prompt and its output are kept; blocks that are reused are kept at least so. With
        ``no_store`` nothing of them is stored.
        Blocks the calling thread. Raises ``ValueError`` for options that need more than one plain sequence, see
        ``check_options``; never for anything that the store does.
        """
        check_options(self.model, input_ids, options)
        clock = self._client.clock
        start_s = clock.now_s()
        chain, why = self._chain_or_why(input_ids[0].tolist(), extras)
        retention = self._retention if retention is None else retention
        restored = self._restore(chain, retention)
        restore_s = clock.now_s() - start_s
        made = generate_from(self.model, input_ids, restored.cache, clock=clock, **options)
        stored = _nothing_stored()
        if chain is not None:
            stored = self._store(made, extras, restored.tokens, retention)
        computed = input_ids.shape[1] - restored.tokens
        if computed >= self.block_tokens:
            with suppress(ClosedError):
                self._client.report_prefill(computed, made.first_token_s)
        first_token_s = restore_s + made.first_token_s
        return Generation(
            made.output, made.tokens, restored.tokens, restored.bytes, restore_s, first_token_s, stored, why
        )

    def chain(self, tokens: list[int], extras: Extras | None = None) -> Chain:
        """The names of a prompt's blocks, for the client's own verbs (``match``, ``pin``, ``prefetch``).

        Raises ``IdentityError`` while nothing can be named, see ``Generation.uncacheable``.
        """
        chain, why = self._chain_or_why(tokens, extras)
        if chain is None:
            raise IdentityError(why)
        return chain

    def restore(self, tokens: list[int], extras: Extras | None = None) -> Restored:
        """What the store has of a prompt, as a cache; nothing is computed. Raises ``IdentityError``."""
        return self._restore(self.chain(tokens, extras), KEEP)

    # -- names ----------------------------------------------------------------------------------------------------

    def _chain_or_why(self, tokens: list[int], extras: Extras | None) -> tuple[Chain | None, str | None]:
        why = _why_not(self.model, extras)
        if why is None and (now := computes_in(self.model)) != self._computes_in:
            why = f"the model computes in {now}, and in {self._computes_in} when its connector was made: make another"
        if why is None:
            space, why = self._opened()
            if space is not None:
                chain = space.chain(tokens, extras=extras)
                why = chain.uncacheable
                if len(chain) or why is None:
                    return chain, why
        if why is not None:
            self._warn(f"generated without the store: {why}")
        return None, why

    def _opened(self) -> tuple[OpenNamespace | None, str | None]:
        """The namespace, once the weights have their name."""
        if self._space is None:
            weights = self._weights
            if isinstance(weights, Future):
                if not weights.done():
                    return None, "the digest of the weights is not known yet"
                if weights.cancelled() or weights.exception() is not None:
                    return None, "the digest of the weights could not be made"
                weights = weights.result()
            spec = NamespaceSpec(
                weights,
                self.layout,
                ENGINE,
                weights_epoch=self._epoch,
                salt=self._salt,
                lossy_codec=self._lossy_codec,
            )
            try:
                self._space = self._client.open_namespace(spec)
            except ClosedError:
                return None, "the store is closed"
        return self._space, None

    # -- there and back -------------------------------------------------------------------------------------------

    def _restore(self, chain: Chain | None, retention: Retention) -> Restored:
        nothing = Restored(new_cache(self.model.config))
        if chain is None:
            return nothing
        try:
            wish = None if retention == KEEP else retention
            with self._client.load(
                chain, timeout_s=self._load_timeout_s, owner=ENGINE, retention=wish
            ) as lease:
                return (self._onboard(lease) if lease.tokens else None) or nothing
        except ClosedError:
            return nothing

    def _onboard(self, lease: Lease) -> Restored | None:
        blocks = len(lease)
        cache = blank_cache(self.model.config, self.shape, blocks * self.block_tokens, self.model.device)
        kv = pages_of(cache, self.shape, self.block_tokens)
        needed = [self.layout.trailing_blocks(group) for group in range(len(self.layout.groups))]
        pages = [
            [() if last is not None and block < blocks - last else (block,) for last in needed]
            for block in range(blocks)
        ]
        try:
            arriving = kv if self.encoding is None else self.encoding.blank(blocks, self.model.device)
        except RuntimeError as error:
            self._warn("there is no memory for encoded blocks, so they are computed", error)
            return None
        settle(self.model.device)
        if self.hot is not None:
            onboarded = self.hot.onboard(self._client, lease, arriving, pages)
        else:
            onboarded = self._client.onboard(lease, arriving, pages)
        if not onboarded.result():
            return None
        if self.encoding is not None:
            whole = [range(0 if last is None else max(0, blocks - last), blocks) for last in needed]
            try:
                self.encoding.decode(arriving, kv, whole)
            except RuntimeError as error:
                self._warn("blocks could not be decoded, so they are computed", error)
                return None
        cut_cache(cache, lease.tokens)
        copied = sum(
            self.layout.payload_bytes(group)
            for block in pages
            for group, chosen in enumerate(block)
            if chosen
        )
        return Restored(cache, lease.tokens, copied)

    def _store(
        self, made: Generated, extras: Extras | None, reused_tokens: int, retention: Retention
    ) -> Future[Stored]:
        """Offloads the blocks that were filled by this call. Those that window layers had left before it are not whole
        in the cache, and the store has had them."""
        assert self._space is not None
        chain = self._space.chain(list(made.tokens[: made.settled_tokens]), extras=extras)
        first = min(reused_tokens // self.block_tokens, len(chain))
        kv = self._pages_made(made.cache)
        if kv is None:
            return _nothing_stored()
        chosen, refused = range(first, len(chain)), 0
        if self.encoding is not None and chosen:
            kv, blocks = self._encoded(self.encoding, kv, chosen)
            chosen, refused = range(blocks), len(chosen) - blocks
        stored = _nothing_stored()
        if chosen:
            pages = [[(page,)] * len(self.layout.groups) for page in chosen]
            with suppress(ClosedError):
                stored = self._client.offload(kv, pages, chain, first=first, retention=retention)
        return _without(stored, refused) if refused else stored

    def _pages_made(self, cache: DynamicCache) -> PagedKV | None:
        """``None`` for a cache that is not what the layout says: its bytes would be taken for others."""
        try:
            found = shape_of(cache)
            if found == self.shape:
                return pages_of(cache, self.shape, self.block_tokens)
            self._warn(
                f"the model has filled a cache of {found.dtype} and not of {self.shape.dtype}: nothing stored"
            )
        except LayoutError as error:
            self._warn("the model has filled a cache that cannot be cut into blocks: nothing stored", error)
        return None

    def _encoded(self, encoding: PageCodec, kv: PagedKV, chosen: range) -> tuple[PagedKV, int]:
        """(the encoded blocks, how many of them can be stored). One that its codec cannot hold ends the prompt for the
        store: nobody could reach those behind it."""
        try:
            made = encoding.encode(kv, chosen.start, len(chosen))
        except RuntimeError as error:
            self._warn("blocks could not be encoded, so they were not stored", error)
            return kv, 0
        if made.whole < len(chosen):
            self._warn(
                "a block holds numbers that are not finite, or beyond any scale of its codec: neither it nor what "
                "follows it is stored"
            )
        return made.kv, made.whole

    def _warn(self, text: str, error: Exception | None = None) -> None:
        """Once for each text."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning("transformers: %s%s", text, "" if error is None else f": {error}")


def layout_id_of(config: PreTrainedConfig) -> str:
    """Names the inside of a page and everything in a configuration that changes its bytes.

    Raises ``IdentityError`` when keys depend on more than the tokens before them.
    """
    fields = config.to_dict()
    if rope := _length_dependent_rope(fields):
        raise IdentityError(
            f"rope_type = {rope!r}: keys depend on the length of the whole prompt, so none is reusable"
        )
    told = {name: value for name, value in fields.items() if name not in _NAMES_ONLY}
    text = json.dumps(told, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    return f"transformers-KV-head-token/{config.model_type}/{digest}"


def _length_dependent_rope(fields: Any) -> str | None:
    """The first such kind anywhere in a configuration (they nest it by layer type, and by sub-model)."""
    if isinstance(fields, Mapping):
        for name, value in fields.items():
            if name in ("rope_type", "type") and value in _LENGTH_DEPENDENT_ROPE:
                return str(value)
            if found := _length_dependent_rope(value):
                return found
    return None


def _one_token(model: PreTrainedModel) -> DynamicCache:
    """A cache with one token in it."""
    import torch

    if model.config.is_encoder_decoder:
        raise LayoutError("an encoder-decoder keeps a cache for each of its halves; only decoders are cached")
    cache = new_cache(model.config)
    with torch.inference_mode():
        model(torch.zeros((1, 1), dtype=torch.long, device=model.device), **given(model, cache))
    return cache


def _why_not(model: PreTrainedModel, extras: Extras | None) -> str | None:
    """Why the model, as it is now, must not be cached under these extras."""
    if model.training:
        return "the model is in training mode, where dropout makes keys and values random"
    adapted = getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False)
    if adapted and (extras is None or extras.adapter is None):
        return "the model has an adapter that the extras do not name"
    return None


def _page_codec(layout: Layout, codec: str | None, encode_at: str) -> PageCodec:
    if encode_at != "device":
        raise ConfigError("encode_at", encode_at, "it is 'edge' or 'device'")
    if codec is None:
        raise ConfigError("encode_at", encode_at, "name the codec, lossy_codec='int8' or 'fp8_e4m3'")
    return PageCodec(layout, codec)


def _without(stored: Future[Stored], refused: int) -> Future[Stored]:
    """The same with blocks that were not given to the store."""
    both: Future[Stored] = Future()

    def over(future: Future[Stored]) -> None:
        if future.cancelled():
            both.cancel()
        elif (error := future.exception()) is not None:
            both.set_exception(error)
        else:
            found = future.result()
            found.drop(NOT_ENCODED, refused)
            deliver(both, found)

    stored.add_done_callback(over)
    return both


def _nothing_stored() -> Future[Stored]:
    future: Future[Stored] = Future()
    future.set_result(Stored())
    return future
