"""D1 to D4: what must not share bytes does not share names."""

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from keys_support import GROUP, LAYOUT, layout, namespace, spec

from tierkv import frame
from tierkv.errors import IdentityError, LayoutError
from tierkv.frame import FrameHeader
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
from tierkv.layout import GroupKind, LayerGroup, Layout, Segment

ROOT = Path(__file__).parent.parent
PROMPT = list(range(64))


def shared_blocks(one: Chain, other: Chain) -> int:
    """Leading blocks of two prompts that a store would take for the same bytes."""
    keys = [[chain.namespace.block_key(each, 0) for each in chain.hashes] for chain in (one, other)]
    equal = [a == b for a, b in zip(*keys, strict=False)]
    assert not any(equal[equal.index(False) :] if False in equal else []), (
        "names meet again after they parted"
    )
    return sum(equal)


# ---- adapters


def test_d1_adapters_do_not_share_blocks_with_each_other_or_with_the_base_model() -> None:
    space = namespace()
    chains = [
        space.chain(PROMPT, extras=Extras(adapter=adapter))
        for adapter in (None, Adapter("a", "rev"), Adapter("b", "rev"))
    ]
    assert [len(chain) for chain in chains] == [4, 4, 4]
    assert [chain.uncacheable for chain in chains] == [None] * 3
    for i, one in enumerate(chains):
        assert shared_blocks(one, one) == 4
        for other in chains[:i]:
            assert shared_blocks(one, other) == 0
            assert not set(one.hashes) & set(other.hashes)


def test_d1_name_and_revision_are_told_apart() -> None:
    space = namespace()
    one, other = (
        space.chain(PROMPT, extras=Extras(adapter=adapter))
        for adapter in (Adapter("ab", "c"), Adapter("a", "bc"))
    )
    assert shared_blocks(one, other) == 0


def test_d1_two_processes_that_see_adapters_in_opposite_order_agree() -> None:
    code = (
        "import sys\n"
        "from keys_support import namespace\n"
        "from tierkv.keys import Adapter, Extras\n"
        "space = namespace()\n"
        "for name in sys.argv[1:]:\n"
        "    chain = space.chain(list(range(64)), extras=Extras(adapter=Adapter(name, 'rev of ' + name)))\n"
        "    print(name, *[space.block_key(each, 1).hex() for each in chain.hashes])\n"
    )
    printed = []
    for order in (["a", "b", "c"], ["c", "b", "a"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *order],
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        printed.append(sorted(done.stdout.splitlines()))
    assert len(printed[0]) == 3
    assert printed[0] == printed[1]


def test_d2_another_revision_is_a_miss() -> None:
    space = namespace()
    first, second, again = (
        space.chain(PROMPT, extras=Extras(adapter=Adapter("a", revision))) for revision in ("1", "2", "1")
    )
    assert shared_blocks(first, second) == 0
    assert shared_blocks(first, again) == 4


@pytest.mark.parametrize("revision", [None, ""])
def test_d2_an_adapter_without_a_revision_caches_nothing(revision: str | None) -> None:
    extras = Extras(adapter=Adapter("poet", revision))
    for chain in (
        namespace().chain(PROMPT, extras=extras),
        namespace(hash_scheme="engine").chain(
            engine_hashes=[bytes([i]) * 32 for i in range(4)], extras=extras
        ),
    ):
        assert len(chain) == 0
        assert chain.num_tokens == 64
        assert chain.uncacheable == "adapter 'poet' has no revision"


def test_d2_an_adapter_without_a_name_caches_nothing() -> None:
    chain = namespace().chain(PROMPT, extras=Extras(adapter=Adapter("", "rev")))
    assert (len(chain), chain.uncacheable) == (0, "an adapter has no name")


# ---- tenants


def test_d3_a_salt_changes_root_namespace_and_every_key() -> None:
    plain, x, y = (namespace(salt=salt) for salt in (None, "x", "y"))
    for one, other in ((plain, x), (x, y), (plain, y)):
        assert one.root != other.root
        assert one.digest != other.digest
        assert one.prefix[:4] != other.prefix[:4]
        assert one.prefix[4:] != other.prefix[4:]
        assert shared_blocks(one.chain(PROMPT), other.chain(PROMPT)) == 0
    assert shared_blocks(x.chain(PROMPT), namespace(salt="x").chain(PROMPT)) == 4


def test_d3_all_namespaces_of_a_tenant_begin_alike() -> None:
    one, other = namespace(salt="x"), namespace(salt="x", engine="another")
    assert one.prefix[:4] == other.prefix[:4] == tenant_prefix("x")
    assert one.prefix != other.prefix
    for space in (one, other):
        key = space.block_key(space.chain(PROMPT).hashes[0], 0)
        assert key.startswith(space.prefix)
        assert len(key) == 32


def test_d3_a_salt_of_one_request_separates_it() -> None:
    space = namespace()
    chains = [space.chain(PROMPT, extras=Extras(cache_salt=salt)) for salt in (None, "x", "y")]
    assert shared_blocks(chains[0], chains[1]) == shared_blocks(chains[1], chains[2]) == 0
    assert space.chain(PROMPT, extras=Extras(cache_salt="")).uncacheable == "the cache salt is empty"


def test_d3_an_empty_salt_is_refused() -> None:
    with pytest.raises(IdentityError, match="salt = '': an empty salt separates nobody"):
        spec(salt="")


@pytest.mark.parametrize("where", ["namespace", "request"])
def test_d3_no_stored_header_holds_a_salt(where: str) -> None:
    salt = "a very secret salt"
    space = namespace(salt=salt) if where == "namespace" else namespace()
    extras = Extras(cache_salt=salt) if where == "request" else Extras()
    chain = space.chain(PROMPT, extras=extras)
    plain = namespace().chain(PROMPT)

    def header_of(chain: Chain) -> bytes:
        return frame.pack(
            FrameHeader(
                key=chain.namespace.block_key(chain.hashes[1], 0),
                namespace=chain.namespace.digest,
                block_hash=chain.hashes[1],
                parent_hash=chain.parent_of(1),
                depth=1,
                part=0,
                expected_parts=3,
                epoch=0,
                expires_ms=0,
                codec=0,
                decoded_bytes=4096,
                stored_bytes=4096,
                decoded_checksum=1,
                stored_checksum=1,
            )
        )

    stored = header_of(chain)
    for form in (salt.encode(), salt.encode("utf-16-le"), salt.encode().hex().encode(), salt.encode()[:8]):
        assert form not in stored
    assert stored[8:136] != header_of(plain)[8:136]
    if where == "namespace":
        assert stored[40:72] != header_of(plain)[40:72], "the namespace digest differs"


# ---- the namespace


def windowed(tokens: int) -> LayerGroup:
    return replace(GROUP, kind=GroupKind.WINDOW, window_tokens=tokens)


GROUPS = {
    "name": replace(GROUP, name="other"),
    "kind": replace(GROUP, kind=GroupKind.STATE),
    "layers": replace(GROUP, layers=2, page_bytes=2 * GROUP.page_bytes),  # as many bytes
    "page_bytes": replace(GROUP, page_bytes=4096),
    "engine_block_tokens": replace(GROUP, engine_block_tokens=32),
    "window_tokens": windowed(64),
    "replicated": replace(GROUP, replicated=True),
    "inside": replace(
        GROUP,
        inside=(Segment(1, 16, GROUP.page_bytes // 32),),
    ),
}
LAYOUTS: dict[str, Layout] = {
    "layout_id": layout(layout_id="test-HND"),
    "dtype": layout(dtype="float16"),
    "hash_tokens": layout(hash_tokens=8, engine_blocks=2),  # as many tokens a block
    "engine_blocks": layout(engine_blocks=2),
    "tp_size": layout(tp_size=1),
    "pp_size": layout(tp_size=1, pp_size=2),  # as many ranks
    "cp_size": layout(tp_size=1, cp_size=2),
    "groups": layout(groups=(GROUP, replace(GROUP, name="second"))),
}
SPECS: dict[str, Any] = {
    "weights": Weights("digest", "10" * 32),
    "layout": layout(dtype="fp8_e4m3"),
    "engine": "another",
    "weights_epoch": 1,
    "hash_scheme": "engine-sha256",
    "lossy_codec": "int8",
    "salt": "tenant",
    "format_version": 2,
}


def flipped() -> dict[str, Namespace]:
    made = {f"NamespaceSpec.{name}": namespace(**{name: value}) for name, value in SPECS.items()}
    made |= {f"Layout.{name}": namespace(layout=value) for name, value in LAYOUTS.items()}
    for name, group in GROUPS.items():
        n = group.engine_block_tokens // 16
        made[f"LayerGroup.{name}"] = namespace(layout=layout(groups=(group,), engine_blocks=n))
    return made


def test_d4_the_table_flips_every_field() -> None:
    assert set(SPECS) == {field.name for field in fields(NamespaceSpec)}
    assert set(LAYOUTS) == {field.name for field in fields(Layout)}
    assert set(GROUPS) == {field.name for field in fields(LayerGroup)}


@pytest.mark.parametrize("field", sorted(flipped()))
def test_d4_another_value_of_one_field_shares_nothing(field: str) -> None:
    base, other = namespace(), flipped()[field]
    assert other.digest != base.digest
    assert other != base
    assert other.root != base.root
    assert other.prefix != base.prefix
    given: dict[str, Any] = (
        {"tokens": PROMPT}
        if other.spec.hash_scheme == "tokens"
        else {"engine_hashes": list(base.chain(PROMPT).hashes)}
    )
    assert shared_blocks(base.chain(PROMPT), other.chain(**given)) == 0
    # Even one and the same block hash names other bytes.
    block_hash = base.chain(PROMPT).hashes[0]
    assert base.block_key(block_hash, 0) != other.block_key(block_hash, 0)


def test_d4_all_flips_differ_from_each_other() -> None:
    digests = {name: space.digest for name, space in flipped().items()}
    assert len(set(digests.values())) == len(digests)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (layout(dtype="fp8_e4m3"), layout(dtype="fp8_e5m2")),
        (layout(dtype="float16"), layout(dtype="bfloat16")),
        (layout(layout_id="vllm-NHD"), layout(layout_id="vllm-HND")),
        (layout(tp_size=2), layout(tp_size=1, pp_size=2)),
        (layout(groups=(windowed(64),)), layout(groups=(windowed(65),))),
        (
            layout(groups=(replace(GROUP, name="a"), replace(GROUP, name="b"))),
            layout(groups=(replace(GROUP, name="b"), replace(GROUP, name="a"))),
        ),
    ],
)
def test_d4_equal_lengths_do_not_make_equal_bytes(one: Layout, other: Layout) -> None:
    assert [part.payload_bytes for part in one.parts] == [part.payload_bytes for part in other.parts]
    assert shared_blocks(namespace(layout=one).chain(PROMPT), namespace(layout=other).chain(PROMPT)) == 0


def test_d4_the_same_name_with_other_weights_is_a_miss() -> None:
    one = namespace(weights=Weights("digest", "aa" * 32))
    other = namespace(weights=Weights("digest", "ab" * 32))
    revision = namespace(weights=Weights("revision", "aa" * 32))
    assert len({one.digest, other.digest, revision.digest}) == 3


def test_d4_parts_have_different_keys_for_one_hash() -> None:
    space = namespace()
    block_hash = space.chain(PROMPT).hashes[0]
    assert len(LAYOUT.parts) == 2
    assert len({space.block_key(block_hash, part) for part in range(300)}) == 300


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Weights("digest", ""), "weights 'digest' = '': give a digest or a revision"),
        (lambda: Weights("name", "llama"), "weights 'name' = 'llama'"),  # type: ignore[arg-type]
        (lambda: spec(engine=""), "engine = '': name the engine"),
        (lambda: layout(dtype=""), "dtype = '': both must be named"),
        (lambda: layout(layout_id=""), "layout_id = ''"),
    ],
)
def test_d4_an_identity_with_a_hole_is_refused(make: Any, message: str) -> None:
    with pytest.raises((IdentityError, LayoutError), match=message):
        make()


def test_d4_equal_specs_are_one_namespace() -> None:
    assert namespace() == namespace()
    assert hash(namespace()) == hash(namespace())
    assert namespace() != "namespace"


# ---- extras that lack something


IMAGE = MultimodalItem("an image's sha256", 20)


@pytest.mark.parametrize(
    ("extras", "blocks", "reason"),
    [
        (Extras(multimodal=(IMAGE,)), 4, None),
        (
            Extras(multimodal=(MultimodalItem(None, 20),)),
            1,
            "the multimodal item at token 20 has no content hash",
        ),
        (
            Extras(multimodal=(MultimodalItem("", 0),)),
            0,
            "the multimodal item at token 0 has no content hash",
        ),
        (Extras(multimodal=(MultimodalItem(b"", 63), IMAGE)), 3, "the multimodal item at token 63"),
        (Extras(multimodal=(MultimodalItem("x", None),)), 0, "a multimodal item has no offset"),
        (Extras(multimodal=(IMAGE, MultimodalItem("x", -1))), 0, "a multimodal item has no offset"),
        (Extras(multimodal=(MultimodalItem(None, 64),)), 4, None),  # begins after the last full block
        (Extras(prompt_embeds_hash="h"), 4, None),
        (Extras(prompt_embeds_hash=""), 0, "the prompt embeddings have no hash"),
        (Extras(prompt_embeds_hash=b""), 0, "the prompt embeddings have no hash"),
    ],
)
def test_d4_a_missing_field_ends_the_chain_and_says_why(
    extras: Extras, blocks: int, reason: str | None
) -> None:
    plain = namespace().chain(PROMPT)
    scheme = namespace(hash_scheme="engine")
    for chain in (
        namespace().chain(PROMPT, extras=extras),
        scheme.chain(engine_hashes=list(plain.hashes), extras=extras),
    ):
        assert len(chain) == blocks
        assert chain.num_tokens == 64
        if reason is None:
            assert chain.uncacheable is None
        else:
            assert chain.uncacheable is not None
            assert reason in chain.uncacheable


def test_d4_an_offset_that_is_no_integer_is_refused() -> None:
    for offset in ("20", 20.0):
        with pytest.raises(IdentityError, match=r"multimodal offset = .*: it must be an integer"):
            namespace().chain(PROMPT, extras=Extras(multimodal=(MultimodalItem("x", offset),)))  # type: ignore[arg-type]
