"""tierkv's own chain and hashes given by an engine pass the key-scheme contract, and broken schemes do not."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from contracts_support import assert_catches

from tierkv.ids import BlockHash, BlockKey
from tierkv.keys import Chain, Extras, MultimodalItem, Namespace
from tierkv.testing.key_scheme import KeySchemeContract


class TestTokens(KeySchemeContract):
    def chain(self, namespace: Namespace, tokens: Sequence[int], extras: Extras) -> Chain:
        return namespace.chain(tokens, extras=extras)


class TestTokensInBlocksOfFour(TestTokens):
    engine_blocks = 4


def engine_hashes(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """As an engine hashes that knows nothing of adapters or images."""
    previous, found = b"engine", []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = tokens[start : start + block_tokens]
        previous = hashlib.sha256(previous + struct.pack(f"<{block_tokens}q", *block)).digest()
        found.append(previous)
    return found


class TestEngineHashes(KeySchemeContract):
    hash_scheme = "engine-sha256"

    def chain(self, namespace: Namespace, tokens: Sequence[int], extras: Extras) -> Chain:
        hashes = engine_hashes(tokens, self.hash_tokens)
        return namespace.chain(engine_hashes=hashes, num_tokens=len(tokens), extras=extras)


class TestEngineHashesInBlocksOfFour(TestEngineHashes):
    engine_blocks = 4


class TestShortEngineHashes(KeySchemeContract):
    hash_scheme = "engine-128"

    def chain(self, namespace: Namespace, tokens: Sequence[int], extras: Extras) -> Chain:
        hashes = [each[:16] for each in engine_hashes(tokens, self.hash_tokens)]
        return namespace.chain(engine_hashes=hashes, num_tokens=len(tokens), extras=extras)


# ---- broken ones


class Broken(KeySchemeContract):
    def chain(self, namespace: Namespace, tokens: Sequence[int], extras: Extras) -> Chain:
        return namespace.chain(tokens, extras=extras)


class NamesThePartialTail(Broken):
    def chain(self, namespace: Namespace, tokens: Sequence[int], extras: Extras) -> Chain:
        padded = [*tokens, *[0] * (-len(tokens) % self.block_tokens)]
        return replace(super().chain(namespace, padded, extras), num_tokens=len(tokens))


class KnowsTheLength(Broken):
    """Mixes the prompt's length into every name."""

    def chain(self, namespace: Namespace, tokens: Sequence[int], extras: Extras) -> Chain:
        return super().chain(namespace, tokens, replace(extras, cache_salt=f"{len(tokens)}"))


class HashesEveryBlockAlone(Broken):
    def chain(self, namespace: Namespace, tokens: Sequence[int], extras: Extras) -> Chain:
        size = self.block_tokens
        blocks = [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]
        hashes = tuple(
            super(HashesEveryBlockAlone, self).chain(namespace, each, extras).hashes[0] for each in blocks
        )
        return Chain(namespace, hashes, len(tokens))


class IsPolynomial(Broken):
    def chain(self, namespace: Namespace, tokens: Sequence[int], extras: Extras) -> Chain:
        sums = []
        total = 7
        for place, token in enumerate(tokens):
            total = (total * 31 + token) % 2**128
            if (place + 1) % self.block_tokens == 0:
                sums.append(BlockHash(total.to_bytes(32, "big")))
        return Chain(namespace, tuple(sums), len(tokens))


class ForgetsExtras(Broken):
    def chain(self, namespace: Namespace, tokens: Sequence[int], extras: Extras) -> Chain:
        return super().chain(namespace, tokens, Extras())


class JoinsNameAndRevision(Broken):
    def chain(self, namespace: Namespace, tokens: Sequence[int], extras: Extras) -> Chain:
        adapter = extras.adapter
        if adapter and adapter.revision:
            extras = replace(
                extras, adapter=replace(adapter, name=adapter.name + adapter.revision, revision="1")
            )
        return super().chain(namespace, tokens, extras)


class ForgetsTheImageAfterItsBlock(Broken):
    def chain(self, namespace: Namespace, tokens: Sequence[int], extras: Extras) -> Chain:
        plain = super().chain(namespace, tokens, Extras())
        chain = super().chain(namespace, tokens, extras)
        parted = [i for i, each in enumerate(chain.hashes) if each != plain.hashes[i]][:1]
        hashes = tuple(chain.hashes[i] if i in parted else each for i, each in enumerate(plain.hashes))
        return replace(chain, hashes=hashes)


class CaresForTheOrderOfImages(Broken):
    def chain(self, namespace: Namespace, tokens: Sequence[int], extras: Extras) -> Chain:
        first = extras.multimodal[0].content_hash if extras.multimodal else None
        return super().chain(namespace, tokens, replace(extras, cache_salt=str(first)))


class InventsAHash(Broken):
    def chain(self, namespace: Namespace, tokens: Sequence[int], extras: Extras) -> Chain:
        items = tuple(
            MultimodalItem(each.content_hash or "none", each.offset or 0) for each in extras.multimodal
        )
        return super().chain(namespace, tokens, replace(extras, multimodal=items))


class ForgetsTheEngine(Broken):
    def namespace(self, **changes: object) -> Namespace:
        return super().namespace(**{name: value for name, value in changes.items() if name != "engine"})


class OnePrefixForAll(Broken):
    def namespace(self, **changes: object) -> Namespace:
        namespace = super().namespace(**changes)
        object.__setattr__(namespace, "prefix", bytes(12))
        return namespace


class OneKeyForAllParts(Broken):
    def namespace(self, **changes: object) -> Namespace:
        return _OnePart(super().namespace(**changes).spec)


class _OnePart(Namespace):
    def block_key(self, block_hash: BlockHash, part: int) -> BlockKey:
        return super().block_key(block_hash, 0)


class HasNoFirst(Broken):
    def chain(self, namespace: Namespace, tokens: Sequence[int], extras: Extras) -> Chain:
        chain = super().chain(namespace, tokens, extras)
        return _Orphans(chain.namespace, chain.hashes, chain.num_tokens, chain.uncacheable)


class _Orphans(Chain):
    def parent_of(self, index: int) -> BlockHash | None:
        return self.hashes[index - 1]


class UsesTheBuiltinHash(Broken):
    def chain(self, namespace: Namespace, tokens: Sequence[int], extras: Extras) -> Chain:
        return super().chain(namespace, tokens, replace(extras, cache_salt=str(hash(str(extras)))))


CAUGHT_BY = [
    (NamesThePartialTail, "test_d06_only_full_blocks_have_names"),
    (KnowsTheLength, "test_a_longer_prompt_begins_with_the_names_of_the_shorter"),
    (HashesEveryBlockAlone, "test_d05_every_token_counts"),
    (IsPolynomial, "test_d05_pairs_that_weak_hashes_confuse"),
    (ForgetsExtras, "test_d01_d02_what_concerns_the_first_block_parts_all"),
    (JoinsNameAndRevision, "test_d01_d02_what_concerns_the_first_block_parts_all"),
    (ForgetsTheImageAfterItsBlock, "test_d04_a_late_image_parts_from_its_block_on"),
    (CaresForTheOrderOfImages, "test_d04_the_order_in_which_images_are_named_means_nothing"),
    (InventsAHash, "test_d02_d04_what_lacks_its_identity_has_no_name"),
    (InventsAHash, "test_d04_a_late_image_without_a_hash_ends_the_chain"),
    (ForgetsTheEngine, "test_d04_one_field_makes_another_namespace"),
    (OnePrefixForAll, "test_d03_tenants_share_nothing_and_keep_their_secret"),
    (OneKeyForAllParts, "test_parts_have_keys_of_their_own"),
    (HasNoFirst, "test_parents"),
    (UsesTheBuiltinHash, "test_d05_every_process_makes_the_same_keys"),
]


@pytest.mark.parametrize(
    ("mutant", "test"), CAUGHT_BY, ids=[f"{each.__name__}-{test}" for each, test in CAUGHT_BY]
)
def test_the_contract_catches(mutant: type[KeySchemeContract], test: str, tmp_path: Path) -> None:
    assert_catches(mutant, test, tmp_path)


def test_every_test_of_the_contract_has_a_mutant() -> None:
    tests = {name for name in dir(KeySchemeContract) if name.startswith("test_")}
    assert tests == {test for _, test in CAUGHT_BY}
