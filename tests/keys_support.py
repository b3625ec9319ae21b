"""A small namespace for the tests of names, in a form that runs on any Python, also without numpy."""

from __future__ import annotations

from typing import Any

from tierkv.keys import Namespace, NamespaceSpec, Weights
from tierkv.layout import GroupKind, LayerGroup, Layout

TOKENS = 16
GROUP = LayerGroup("full", GroupKind.FULL, layers=4, page_bytes=16384, engine_block_tokens=TOKENS)
LAYOUT = Layout("test-NHD", "bfloat16", TOKENS, (GROUP,), tp_size=2)


def spec(**changes: Any) -> NamespaceSpec:
    """The namespace's spec with some fields of its own or of its layout changed."""
    own: dict[str, Any] = {"weights": Weights("digest", "0f" * 32), "layout": LAYOUT, "engine": "test"}
    return NamespaceSpec(**(own | changes))


def layout(**changes: Any) -> Layout:
    own: dict[str, Any] = {
        "layout_id": LAYOUT.layout_id,
        "dtype": LAYOUT.dtype,
        "hash_tokens": LAYOUT.hash_tokens,
        "groups": LAYOUT.groups,
        "tp_size": LAYOUT.tp_size,
    }
    return Layout(**(own | changes))


def namespace(**changes: Any) -> Namespace:
    return Namespace(spec(**changes))
