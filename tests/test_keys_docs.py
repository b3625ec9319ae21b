"""What docs/keys.md says is so."""

import hashlib
import re
import struct
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from keys_support import namespace

from tierkv.keys import Adapter, Chain, Extras, MultimodalItem, NamespaceSpec, canonical, tenant_prefix
from tierkv.layout import Layout

DOCS = (Path(__file__).parent.parent / "docs/keys.md").read_text()
PROMPT = list(range(80))


@pytest.fixture
def where_they_part() -> Callable[[Chain, Chain], str]:
    snippet = re.search(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert snippet is not None
    names: dict[str, Any] = {}
    exec(snippet[1], names)
    found: Callable[[Chain, Chain], str] = names["where_they_part"]
    return found


def test_the_snippet_finds_where_two_prompts_part(where_they_part: Callable[[Chain, Chain], str]) -> None:
    space = namespace()
    plain = space.chain(PROMPT)
    later = space.chain([*PROMPT[:40], 7, *PROMPT[41:]])
    image = space.chain(PROMPT, extras=Extras(multimodal=(MultimodalItem(None, 20),)))
    nobody = space.chain(PROMPT, extras=Extras(adapter=Adapter("poet")))
    assert where_they_part(plain, plain) == "after 5 blocks (80 tokens)"
    assert where_they_part(plain, later) == "after 2 blocks (32 tokens)"
    assert where_they_part(plain, image).startswith(
        "after 1 blocks (16 tokens): the multimodal item at token 20"
    )
    assert where_they_part(nobody, plain) == "after 0 blocks (0 tokens): adapter 'poet' has no revision"
    assert where_they_part(plain, namespace(salt="x").chain(PROMPT)).startswith("in the namespace")


def test_every_field_of_the_namespace_is_explained() -> None:
    table = DOCS[DOCS.index("## The namespace") : DOCS.index("## The block hash")]
    for field in (*fields(NamespaceSpec), *fields(Layout)):
        assert field.name in table, field.name


def test_the_bytes_of_root_and_key_are_those_of_the_docs() -> None:
    space = namespace(salt="tenant")
    assert space.root == hashlib.sha256(canonical(("tierkv root", space.digest))).digest()
    block_hash = space.chain(PROMPT).hashes[1]
    key = space.block_key(block_hash, 3)
    assert key[:4] == tenant_prefix("tenant")
    assert key[4:12] == space.digest[:8]
    assert key[12:] == hashlib.sha256(space.digest + block_hash + struct.pack(">H", 3)).digest()[:20]


def test_the_reasons_in_the_docs_are_those_of_the_code() -> None:
    reasons = [
        Extras(adapter=Adapter("poet")),
        Extras(multimodal=(MultimodalItem(None, 20),)),
        Extras(multimodal=(MultimodalItem("x", None),)),
        Extras(prompt_embeds_hash=""),
        Extras(cache_salt=""),
    ]
    for extras in reasons:
        assert f"`{namespace().chain(PROMPT, extras=extras).uncacheable}`" in DOCS
