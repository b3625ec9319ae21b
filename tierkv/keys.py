"""Names of bytes: namespaces, chained prefix hashes, block keys.

    root         = sha256("tierkv root" | namespace digest)
    block hash i = sha256(block hash i-1 | int32 tokens of block i [| digest of the extras that begin in block i])
    block key    = tenant tag (4) | namespace tag (8) | sha256(namespace digest | block hash | part)[:20]

The chain carries what concerns an early block into all later ones. An engine that has hashes of its own passes them
instead of tokens; what they forget (adapter revision, say) enters as a running digest of the extras so far. All
encodings are canonical and injective: typed and length-prefixed, never ``hash()``, never string concatenation, never
pickle, the same in every process. See ``docs/keys.md``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index as index_of
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from tierkv.codec import LOSSY
from tierkv.errors import IdentityError
from tierkv.ids import (
    HASH_BYTES,
    NAMESPACE_PREFIX_BYTES,
    NAMESPACE_TAG_BYTES,
    TENANT_TAG_BYTES,
    BlockHash,
    BlockKey,
    KeyPrefix,
    NamespaceDigest,
)
from tierkv.layout import Layout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT_VERSION = 1
"""Changes whenever the same namespace would name other bytes."""

Encodable = None | bool | int | str | bytes | tuple["Encodable", ...]


def canonical(value: Encodable) -> bytes:
    """An injective encoding: one type byte, the length in 8 bytes, the content.

    Raises ``IdentityError`` for other types.
    """
    # bool before int: True is an int in Python, yet another value here.
    if value is None:
        tag, body = b"n", b""
    elif isinstance(value, bool):
        tag, body = b"b", bytes([value])
    elif isinstance(value, int):
        tag, body = b"i", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
    elif isinstance(value, str):
        tag, body = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        tag, body = b"y", value
    elif isinstance(value, tuple):
        tag, body = b"t", b"".join(map(canonical, value))
    else:
        raise IdentityError(f"{value!r}: {type(value).__name__} has no canonical encoding")
    return tag + struct.pack(">Q", len(body)) + body


def _digest(*values: Encodable) -> bytes:
    return hashlib.sha256(canonical(values)).digest()


@dataclass(frozen=True)
class Weights:
    """Which weights computed the bytes: a digest of their content, or an immutable revision.

    A display name is neither.
    """

    kind: Literal["digest", "revision"]
    value: str

    def __post_init__(self) -> None:
        if self.kind not in ("digest", "revision") or not self.value:
            raise IdentityError(
                f"weights {self.kind!r} = {self.value!r}: give a digest or a revision, not empty"
            )


@dataclass(frozen=True)
class NamespaceSpec:
    """Everything that changes the bytes of a block or who may see them; layer group and rank are the part."""

    weights: Weights
    layout: Layout
    engine: str
    """Engine and version range whose pages are alike, for instance ``"transformers"``."""
    weights_epoch: int = 0
    """Counts online updates of the weights."""
    hash_scheme: str = "tokens"
    """``"tokens"`` for tierkv's own chain, else the engine's name for its hashes (``"vllm-sha256-cbor"``)."""
    lossy_codec: str | None = None
    """An edge with this codec may make these blocks smaller at a loss."""
    salt: str | None = None
    """Tenant secret: other tenants neither hit nor see these blocks. Never stored, only digested."""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if not self.engine:
            raise IdentityError("engine = '': name the engine whose pages these are")
        if self.salt is not None and not self.salt:
            raise IdentityError("salt = '': an empty salt separates nobody; use None or a secret")
        if self.lossy_codec is not None and self.lossy_codec not in LOSSY:
            raise IdentityError(f"lossy_codec = {self.lossy_codec!r}: use one of {sorted(LOSSY)}, or None")


@dataclass(frozen=True)
class Adapter:
    """An adapter (LoRA) by name and revision, a digest of its files. Without a revision nothing is cacheable."""

    name: str
    revision: str | None = None


@dataclass(frozen=True)
class MultimodalItem:
    """An image or sound whose content replaces placeholder tokens from ``offset`` on."""

    content_hash: str | bytes | None
    offset: int | None


@dataclass(frozen=True)
class Extras:
    """What changes the keys and values of a prompt beside its tokens."""

    adapter: Adapter | None = None
    multimodal: tuple[MultimodalItem, ...] = ()
    prompt_embeds_hash: str | bytes | None = None
    cache_salt: str | None = None
    """A salt for one request, beside the namespace's."""

    def is_empty(self) -> bool:
        return self == _NO_EXTRAS


_NO_EXTRAS = Extras()

OPENING_TOKENS = 1024
OPENING_HASHES = 64


class Opening(NamedTuple):
    """How a prompt begins, as far as it takes to name its first block under another namespace: for explanations."""

    extras: Extras
    tokens: bytes | None = None
    """The first tokens as int32, or ``None`` where the engine gave hashes."""
    engine_hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Chain:
    """The block hashes of one prompt, in order; only full blocks have one.

    ``num_tokens`` is the length of the whole prompt. ``uncacheable`` says why the chain ends before its last full block
    (an adapter without a revision, a multimodal item without its hash): the rest must not be stored.
    """

    namespace: Namespace = field(repr=False)
    hashes: tuple[BlockHash, ...] = field(repr=False)
    num_tokens: int
    uncacheable: str | None = None
    opening: Opening | None = field(default=None, repr=False, compare=False)
    asked: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    """What was counted of the request so far (``tierkv.ceiling``): the one thing about a chain that changes."""

    def __len__(self) -> int:
        return len(self.hashes)

    @cached_property
    def joined(self) -> bytes:
        """All hashes, one behind the other, as messages carry them."""
        return b"".join(self.hashes)

    def parent_of(self, index: int) -> BlockHash | None:
        """The hash before block ``index``, ``None`` for the first."""
        return self.hashes[index - 1] if index else None


@dataclass(frozen=True, eq=False)
class Namespace:
    """A namespace with its digest worked out. Immutable; may be shared by threads."""

    spec: NamespaceSpec
    digest: NamespaceDigest = field(init=False)
    prefix: KeyPrefix = field(init=False)
    root: BlockHash = field(init=False)

    def __post_init__(self) -> None:
        digest = _namespace_digest(self.spec)
        prefix = tenant_prefix(self.spec.salt) + digest[:NAMESPACE_TAG_BYTES]
        object.__setattr__(self, "digest", NamespaceDigest(digest))
        object.__setattr__(self, "prefix", KeyPrefix(prefix))
        object.__setattr__(self, "root", BlockHash(_digest("tierkv root", digest)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and other.digest == self.digest

    def __hash__(self) -> int:
        return int.from_bytes(self.digest[:8], "big")

    @property
    def layout(self) -> Layout:
        return self.spec.layout

    def block_key(self, block_hash: BlockHash, part: int) -> BlockKey:
        """The name of one part's bytes in every blob tier."""
        return block_key(self.digest, self.prefix, block_hash, part)

    def chain(
        self,
        tokens: Sequence[int] | NDArray[np.integer] | None = None,
        *,
        engine_hashes: Sequence[bytes] | None = None,
        num_tokens: int | None = None,
        extras: Extras = _NO_EXTRAS,
    ) -> Chain:
        """Names the full blocks of a prompt, by its tokens or by the engine's own hashes.

        ``tokens``: ids that fit into int32 (a list or tuple, a numpy array). ``engine_hashes``: one for each full
        engine block, 16 to 64 bytes each; then ``num_tokens`` is the length of the prompt (default: what the hashes
        cover). Raises ``IdentityError`` for input that cannot be named; what must not be cached only shortens the
        chain.
        """
        if (tokens is None) == (engine_hashes is None):
            raise IdentityError("give either tokens or engine_hashes")
        if tokens is not None:
            if num_tokens is not None and num_tokens != len(tokens):
                raise IdentityError(f"num_tokens = {num_tokens}: {len(tokens)} tokens were given")
            if self.spec.hash_scheme != "tokens":
                raise IdentityError(
                    f"hash_scheme = {self.spec.hash_scheme!r}: this namespace takes engine_hashes"
                )
            return _chain_of_tokens(self, tokens, extras)
        assert engine_hashes is not None
        if self.spec.hash_scheme == "tokens":
            raise IdentityError(
                "hash_scheme = 'tokens': engine_hashes need a namespace that names their scheme"
            )
        return _chain_of_hashes(self, engine_hashes, num_tokens, extras)


def block_key(digest: NamespaceDigest, prefix: KeyPrefix, block_hash: BlockHash, part: int) -> BlockKey:
    """The name of one part's bytes; ``digest`` and ``prefix`` are the namespace's."""
    inner = hashlib.sha256(digest + block_hash + struct.pack(">H", part)).digest()
    return BlockKey(prefix + inner[: HASH_BYTES - NAMESPACE_PREFIX_BYTES])


def chain_of_blocks(namespace: Namespace, hashes: Sequence[bytes | str]) -> Chain:
    """A chain of block hashes that are known already (32 bytes each, or their hex), as logs and events show them."""
    blocks = []
    for given in hashes:
        try:
            block_hash = bytes.fromhex(given) if isinstance(given, str) else bytes(memoryview(given))
        except (TypeError, ValueError):
            raise IdentityError(f"block hash {given!r} is neither bytes nor a hexadecimal number") from None
        if len(block_hash) != HASH_BYTES:
            raise IdentityError(
                f"block hash {given!r} has {len(block_hash)} bytes; it must have {HASH_BYTES}"
            )
        blocks.append(BlockHash(block_hash))
    return Chain(namespace, tuple(blocks), len(blocks) * namespace.layout.block_tokens)


def tenant_prefix(salt: str | None) -> KeyPrefix:
    """The first bytes of all keys of a tenant (of everybody without a salt, for ``None``)."""
    return KeyPrefix(_digest("tierkv tenant", salt)[:TENANT_TAG_BYTES])


def _namespace_digest(spec: NamespaceSpec) -> bytes:
    layout = spec.layout
    groups = tuple(
        (
            *(
                g.name,
                g.kind.value,
                g.layers,
                g.page_bytes,
                g.engine_block_tokens,
                g.window_tokens,
                g.replicated,
            ),
            *[(segment.outer, segment.tokens, segment.inner) for segment in g.inside],
        )
        for g in layout.groups
    )
    shape = (layout.layout_id, layout.dtype, layout.hash_tokens, layout.engine_blocks, groups)
    geometry = (layout.tp_size, layout.pp_size, layout.cp_size)
    return _digest(
        "tierkv namespace",
        spec.format_version,
        (spec.weights.kind, spec.weights.value, spec.weights_epoch),
        spec.engine,
        shape,
        geometry,
        spec.hash_scheme,
        spec.lossy_codec,
        spec.salt,
    )


def _events(extras: Extras, block_tokens: int) -> tuple[dict[int, bytes], int | None, str | None]:
    """What the extras add: block index -> digest; the first block that must not be cached, and why."""
    why = _why_nothing(extras)
    if why is not None:
        return {}, 0, why
    start: list[Encodable] = []
    if extras.adapter is not None:
        start.append(("adapter", extras.adapter.name, extras.adapter.revision))
    if extras.prompt_embeds_hash is not None:
        start.append(("prompt_embeds", extras.prompt_embeds_hash))
    if extras.cache_salt is not None:
        start.append(("cache_salt", extras.cache_salt))
    by_block: dict[int, list[Encodable]] = {0: start} if start else {}
    limit = None
    for offset, item in sorted(((_offset_of(item), item) for item in extras.multimodal), key=itemgetter(0)):
        block = offset // block_tokens
        if not item.content_hash:
            limit, why = block, f"the multimodal item at token {offset} has no content hash"
            break
        by_block.setdefault(block, []).append(("multimodal", item.content_hash, offset))
    return {block: _digest("tierkv extras", *values) for block, values in by_block.items()}, limit, why


def _offset_of(item: MultimodalItem) -> int:
    try:
        return index_of(item.offset)  # type: ignore[arg-type]
    except TypeError:
        raise IdentityError(f"multimodal offset = {item.offset!r}: it must be an integer") from None


def _why_nothing(extras: Extras) -> str | None:
    """Why no block at all may be cached under these extras, or ``None``."""
    adapter = extras.adapter
    if adapter is not None and not adapter.name:
        return "an adapter has no name"
    if adapter is not None and not adapter.revision:
        return f"adapter {adapter.name!r} has no revision"
    if extras.prompt_embeds_hash is not None and not extras.prompt_embeds_hash:
        return "the prompt embeddings have no hash"
    if extras.cache_salt is not None and not extras.cache_salt:
        return "the cache salt is empty"
    # Not even the first block is safe when nobody knows where an item begins.
    if any(item.offset is None or _offset_of(item) < 0 for item in extras.multimodal):
        return "a multimodal item has no offset"
    return None


def _int32_bytes(tokens: Sequence[int] | NDArray[np.integer]) -> bytes:
    """The tokens as little-endian int32. Plain sequences need no numpy."""
    if isinstance(tokens, list | tuple):
        try:
            return struct.pack(f"<{len(tokens)}i", *tokens)
        except struct.error as error:
            raise IdentityError(f"tokens: {error}; give a flat sequence of integers that fit int32") from None
    import numpy as np

    given = np.asarray(tokens)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise IdentityError(
            f"tokens: shape {given.shape}, dtype {given.dtype}; give a flat sequence of integers"
        )
    if given.size and given.dtype != np.int32 and (given.min() < -(2**31) or given.max() >= 2**31):
        raise IdentityError("tokens: an id does not fit int32")
    return np.ascontiguousarray(given, dtype="<i4").tobytes()


def _chain_of_tokens(
    namespace: Namespace, tokens: Sequence[int] | NDArray[np.integer], extras: Extras
) -> Chain:
    raw = _int32_bytes(tokens)
    block_tokens = namespace.layout.block_tokens
    step, num_tokens = 4 * block_tokens, len(raw) // 4
    full = num_tokens // block_tokens
    added, limit, why = ({}, None, None) if extras.is_empty() else _events(extras, block_tokens)
    count, why = (limit, why) if limit is not None and limit < full else (full, None)
    hashes: list[bytes] = []
    append, sha256 = hashes.append, hashlib.sha256
    previous: bytes = namespace.root
    done = 0
    for block in [*sorted(block for block in added if block < count), count]:
        # Nothing but tokens up to the next block with extras: this loop is what long prompts wait for.
        for start in range(done * step, block * step, step):
            previous = sha256(previous + raw[start : start + step]).digest()
            append(previous)
        if block < count:
            start = block * step
            previous = sha256(previous + raw[start : start + step] + added[block]).digest()
            append(previous)
        done = block + 1
    opening = Opening(extras, raw[: 4 * OPENING_TOKENS])
    return Chain(namespace, cast("tuple[BlockHash, ...]", tuple(hashes)), num_tokens, why, opening)


def _chain_of_hashes(
    namespace: Namespace, engine_hashes: Sequence[bytes], num_tokens: int | None, extras: Extras
) -> Chain:
    layout = namespace.layout
    n = layout.engine_blocks
    covered = len(engine_hashes) * layout.hash_tokens
    if num_tokens is None:
        num_tokens = covered
    if num_tokens < covered:
        raise IdentityError(f"num_tokens = {num_tokens}: {len(engine_hashes)} hashes cover {covered} tokens")
    chosen = engine_hashes[n - 1 :: n]
    added, limit, why = ({}, None, None) if extras.is_empty() else _events(extras, layout.block_tokens)
    count, why = (limit, why) if limit is not None and limit < len(chosen) else (len(chosen), None)
    hashes: list[BlockHash] = []
    running: bytes | None = None
    for index in range(count):
        given = chosen[index]
        if not isinstance(given, bytes):
            raise IdentityError(f"engine hash {index * n + n - 1} is {type(given).__name__}, not bytes")
        if index in added:
            running = _digest("tierkv running extras", running, added[index])
        if running is None and len(given) == HASH_BYTES:
            hashes.append(BlockHash(given))
        elif 16 <= len(given) <= 64:
            hashes.append(BlockHash(_digest("tierkv engine hash", given, running)))
        else:
            raise IdentityError(f"engine hash {index * n + n - 1} has {len(given)} bytes; 16 to 64 are taken")
    opening = Opening(extras, None, tuple(engine_hashes[:OPENING_HASHES]))
    return Chain(namespace, tuple(hashes), num_tokens, why, opening)
