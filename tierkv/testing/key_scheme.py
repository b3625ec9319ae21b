"""The contract of a key scheme: how an engine's tokens become the names of blocks.

Subclass ``KeySchemeContract`` in the tests of a connector whose engine brings hashes of its own; see
``docs/testing.md``.

    class TestMyEngineHashes(KeySchemeContract):
        hash_scheme = "my-engine-sha256"

        def chain(self, namespace, tokens, extras):
            return namespace.chain(engine_hashes=my_engine_hashes(tokens), num_tokens=len(tokens), extras=extras)

The class must be importable by name, since its keys are computed in other processes too.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tierkv.ids import KEY_BYTES, BlockKey
from tierkv.keys import (
    Adapter,
    Chain,
    Extras,
    MultimodalItem,
    Namespace,
    NamespaceSpec,
    Weights,
    tenant_prefix,
)
from tierkv.layout import GroupKind, LayerGroup, Layout

NOTHING = Extras()
SALT = "a secret that must stay one"

FLIPS: dict[str, dict[str, Any]] = {
    "weights revision": {"weights": Weights("revision", "r2")},
    "weights digest named like the revision": {"weights": Weights("digest", "r1")},
    "weights epoch": {"weights_epoch": 1},
    "engine": {"engine": "engine-2"},
    "lossy codec": {"lossy_codec": "int8"},
    "salt": {"salt": SALT},
    "format version": {"format_version": 999},
    "dtype of equal size": {"layout.dtype": "float16"},
    "fp8 variant": {"layout.dtype": "fp8_e4m3"},
    "layout id of equal size": {"layout.layout_id": "HND"},
    "tp": {"layout.tp_size": 2},
    "pp": {"layout.pp_size": 2},
    "cp": {"layout.cp_size": 2},
    "layers and page swapped": {"group.layers": 4, "group.page_bytes": 2048},
    "replicated": {"group.replicated": True},
    "kind": {"group.kind": GroupKind.WINDOW, "group.window_tokens": 64},
    "group name": {"group.name": "other"},
}
"""One field each that changes the bytes or who may see them, mostly at equal length in bytes."""


class KeySchemeContract:
    """What the store relies on."""

    hash_scheme = "tokens"
    hash_tokens = 16
    """Tokens that one hash of the scheme covers."""
    engine_blocks = 1
    """Hashes for each block (n)."""

    # ---- what a subclass gives

    def chain(self, namespace: Namespace, tokens: Sequence[int], extras: Extras) -> Chain:
        """The names of the full blocks of ``tokens``, as the connector makes them."""
        raise NotImplementedError("override chain")

    # ---- tools

    @property
    def block_tokens(self) -> int:
        return self.hash_tokens * self.engine_blocks

    def namespace(self, **changes: Any) -> Namespace:
        """The namespace of these tests; ``layout.x`` and ``group.x`` among the changes reach into the layout."""
        inner: dict[str, dict[str, Any]] = {"layout": {}, "group": {}}
        outer: dict[str, Any] = {}
        for name, value in changes.items():
            where, _, field = name.rpartition(".")
            (inner[where] if where else outer)[field] = value
        group = LayerGroup(
            "full", GroupKind.FULL, layers=2, page_bytes=4096, engine_block_tokens=self.hash_tokens
        )
        layout = Layout(
            layout_id="NHD",
            dtype="bfloat16",
            hash_tokens=self.hash_tokens,
            groups=(replace(group, **inner["group"]),),
            engine_blocks=self.engine_blocks,
        )
        spec = NamespaceSpec(
            weights=Weights("revision", "r1"),
            layout=replace(layout, **inner["layout"]),
            engine="engine-1",
            hash_scheme=self.hash_scheme,
        )
        return Namespace(replace(spec, **outer))

    def tokens(self, count: int, seed: int = 1) -> list[int]:
        dice = random.Random(seed)
        return [dice.randrange(50_000) for _ in range(count)]

    def hashes(self, tokens: Sequence[int], extras: Extras = NOTHING) -> list[bytes]:
        return list(self.chain(self.namespace(), tokens, extras).hashes)

    def keys(self, namespace: Namespace, tokens: Sequence[int], extras: Extras = NOTHING) -> set[BlockKey]:
        return {namespace.block_key(each, 0) for each in self.chain(namespace, tokens, extras).hashes}

    def check_parts_at(self, left: Sequence[bytes], right: Sequence[bytes], block: int) -> None:
        """The two chains agree before ``block`` and nowhere from there on."""
        assert len(left) == len(right) > block
        assert left[:block] == right[:block], "blocks before the difference have other names"
        assert not set(left[block:]) & set(right[block:]), "blocks after the difference share a name"

    def fingerprint(self) -> str:
        """A digest of keys that meet every kind of input; equal in every process."""
        tokens = self.tokens(5 * self.block_tokens + 3)
        extras = Extras(
            adapter=Adapter("a", "1"),
            multimodal=(MultimodalItem("image", 3), MultimodalItem(b"\0sound", 2 * self.block_tokens)),
            prompt_embeds_hash="e",
            cache_salt="c",
        )
        total = hashlib.sha256()
        for given in (NOTHING, extras):
            for salt in (None, SALT):
                for key in sorted(self.keys(self.namespace(salt=salt), tokens, given)):
                    total.update(key)
        return total.hexdigest()

    # ---- which tokens

    def test_d06_only_full_blocks_have_names(self) -> None:
        size = self.block_tokens
        for count in (0, 1, size - 1, size, size + 1, 4 * size, 4 * size + 1):
            chain = self.chain(self.namespace(), self.tokens(count), NOTHING)
            assert len(chain.hashes) == count // size, f"{count} tokens"
            assert chain.num_tokens == count
            assert chain.uncacheable is None

    def test_a_longer_prompt_begins_with_the_names_of_the_shorter(self) -> None:
        tokens = self.tokens(9 * self.block_tokens)
        whole = self.hashes(tokens)
        assert len(set(whole)) == len(whole)
        for count in range(0, len(tokens), self.block_tokens // 2 or 1):
            names = self.hashes(tokens[:count])
            assert names == whole[: len(names)]

    def test_d05_every_token_counts(self) -> None:
        tokens = self.tokens(6 * self.block_tokens)
        before = self.hashes(tokens)
        for place in (
            0,
            1,
            self.block_tokens - 1,
            self.block_tokens,
            3 * self.block_tokens + 2,
            len(tokens) - 1,
        ):
            changed = list(tokens)
            changed[place] += 1
            self.check_parts_at(before, self.hashes(changed), place // self.block_tokens)

    def test_d05_pairs_that_weak_hashes_confuse(self) -> None:
        tokens = self.tokens(2 * self.block_tokens)
        before = self.hashes(tokens)
        rising, falling, swapped, zeros = list(tokens), list(tokens), list(tokens), list(tokens)
        rising[3], rising[4] = rising[3] + 31, rising[4] - 1
        falling[3], falling[4] = falling[3] + 1, falling[4] - 31
        swapped[3], swapped[4] = swapped[4], swapped[3]
        zeros[0] = 0
        for other in (rising, falling, swapped, zeros):
            self.check_parts_at(before, self.hashes(other), 0)
        same = [7] * (3 * self.block_tokens)
        assert len(set(self.hashes(same))) == 3, "equal blocks at different places share a name"

    # ---- extras

    @pytest.mark.parametrize(
        ("left", "right"),
        [
            (NOTHING, Extras(adapter=Adapter("a", "1"))),
            (Extras(adapter=Adapter("a", "1")), Extras(adapter=Adapter("b", "1"))),
            (Extras(adapter=Adapter("a", "1")), Extras(adapter=Adapter("a", "2"))),
            (Extras(adapter=Adapter("ab", "c")), Extras(adapter=Adapter("a", "bc"))),
            (NOTHING, Extras(prompt_embeds_hash="e")),
            (Extras(prompt_embeds_hash="e"), Extras(prompt_embeds_hash="f")),
            (Extras(prompt_embeds_hash="e"), Extras(cache_salt="e")),
            (Extras(cache_salt="x"), Extras(cache_salt="y")),
            (Extras(multimodal=(MultimodalItem("i", 0),)), Extras(multimodal=(MultimodalItem(b"i", 0),))),
            (Extras(multimodal=(MultimodalItem("i", 0),)), Extras(multimodal=(MultimodalItem("i", 1),))),
            (
                Extras(multimodal=(MultimodalItem("i", 0), MultimodalItem("j", 1))),
                Extras(multimodal=(MultimodalItem("j", 0), MultimodalItem("i", 1))),
            ),
        ],
        ids=lambda extras: None,
    )
    def test_d01_d02_what_concerns_the_first_block_parts_all(self, left: Extras, right: Extras) -> None:
        tokens = self.tokens(4 * self.block_tokens)
        self.check_parts_at(self.hashes(tokens, left), self.hashes(tokens, right), 0)

    def test_d04_a_late_image_parts_from_its_block_on(self) -> None:
        tokens = self.tokens(6 * self.block_tokens)
        offset = 2 * self.block_tokens + 5 % self.block_tokens
        plain = self.hashes(tokens)
        one = self.hashes(tokens, Extras(multimodal=(MultimodalItem("image 1", offset),)))
        two = self.hashes(tokens, Extras(multimodal=(MultimodalItem("image 2", offset),)))
        self.check_parts_at(plain, one, 2)
        self.check_parts_at(one, two, 2)
        self.check_parts_at(plain, two, 2)

    def test_d04_the_order_in_which_images_are_named_means_nothing(self) -> None:
        tokens = self.tokens(4 * self.block_tokens)
        items = (MultimodalItem("image 1", 1), MultimodalItem("image 2", 2 * self.block_tokens))
        assert self.hashes(tokens, Extras(multimodal=items)) == self.hashes(
            tokens, Extras(multimodal=items[::-1])
        )

    @pytest.mark.parametrize(
        ("extras", "blocks"),
        [
            (Extras(adapter=Adapter("a")), 0),
            (Extras(adapter=Adapter("a", "")), 0),
            (Extras(adapter=Adapter("", "1")), 0),
            (Extras(multimodal=(MultimodalItem("i", None),)), 0),
            (Extras(prompt_embeds_hash=""), 0),
            (Extras(multimodal=(MultimodalItem(None, 0),)), 0),
            (Extras(multimodal=(MultimodalItem("", 0),)), 0),
        ],
        ids=lambda value: None,
    )
    def test_d02_d04_what_lacks_its_identity_has_no_name(self, extras: Extras, blocks: int) -> None:
        chain = self.chain(self.namespace(), self.tokens(4 * self.block_tokens), extras)
        assert len(chain.hashes) == blocks
        assert chain.uncacheable

    def test_d04_a_late_image_without_a_hash_ends_the_chain(self) -> None:
        tokens = self.tokens(4 * self.block_tokens)
        chain = self.chain(
            self.namespace(), tokens, Extras(multimodal=(MultimodalItem(None, 2 * self.block_tokens),))
        )
        assert list(chain.hashes) == self.hashes(tokens)[:2]
        assert chain.uncacheable

    # ---- namespaces, tenants, parts

    @pytest.mark.parametrize("flip", FLIPS)
    def test_d04_one_field_makes_another_namespace(self, flip: str) -> None:
        tokens = self.tokens(3 * self.block_tokens)
        one, other = self.namespace(), self.namespace(**FLIPS[flip])
        assert one.digest != other.digest
        assert not self.keys(one, tokens) & self.keys(other, tokens)
        assert self.keys(self.namespace(**FLIPS[flip]), tokens) == self.keys(other, tokens)

    def test_d03_tenants_share_nothing_and_keep_their_secret(self) -> None:
        tokens = self.tokens(3 * self.block_tokens)
        names = {salt: self.namespace(salt=salt) for salt in (None, SALT, "another")}
        keys = {salt: self.keys(namespace, tokens) for salt, namespace in names.items()}
        for salt, namespace in names.items():
            assert all(key.startswith(namespace.prefix) for key in keys[salt])
            assert namespace.prefix.startswith(tenant_prefix(salt))
            foreign = [tenant_prefix(other) for other in names if other != salt]
            assert not any(key.startswith(prefix) for prefix in foreign for key in keys[salt])
        seen = b"".join([names[SALT].digest, *keys[SALT], *self.chain(names[SALT], tokens, NOTHING).hashes])
        assert SALT.encode() not in seen

    def test_parts_have_keys_of_their_own(self) -> None:
        namespace = self.namespace()
        hashes = self.chain(namespace, self.tokens(3 * self.block_tokens), NOTHING).hashes
        keys = {namespace.block_key(each, part) for each in hashes for part in range(8)}
        assert len(keys) == 24
        assert {len(key) for key in keys} == {KEY_BYTES}

    def test_parents(self) -> None:
        chain = self.chain(self.namespace(), self.tokens(3 * self.block_tokens), NOTHING)
        assert [chain.parent_of(i) for i in range(3)] == [None, *chain.hashes[:2]]

    # ---- the same everywhere

    @pytest.mark.parametrize("seed", ["0", "1", "random"])
    def test_d05_every_process_makes_the_same_keys(self, seed: str) -> None:
        here = type(self)
        ask = (
            "import importlib, json, sys; module, name = json.loads(sys.argv[1]);"
            "found = importlib.import_module(module)\n"
            "for part in name.split('.'): found = getattr(found, part)\n"
            "print(found().fingerprint())"
        )
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        answer = subprocess.run(
            [sys.executable, "-c", ask, json.dumps([here.__module__, here.__qualname__])],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.strip() == self.fingerprint()
