"""A namespace that another client of the store has opened, and a look that counts as no request."""

from __future__ import annotations

import dataclasses

import tierkv
from tests.daemon_process import payloads_of, spec_of, tokens_of
from tierkv.client import Client
from tierkv.reading import Reader


def test_a_namespace_that_others_opened_is_adopted_as_it_is() -> None:
    with tierkv.open(host_capacity="4 MiB", host_populate=False) as client:
        layout = dataclasses.replace(spec_of().layout, tp_size=2)
        opened = client.open_namespace(dataclasses.replace(spec_of(), layout=layout), ranks=[1])
        other = Client(client.store)
        adopted = other.adopt(opened.namespace.digest)
        assert adopted is not None
        assert (adopted.namespace, adopted.space, adopted.ranks) == (opened.namespace, opened.space, (1,))
        assert opened.space.expected == layout.mask_of((1,))
        assert other.adopt(opened.namespace.digest) is adopted
        assert other.adopt(b"\0" * 32) is None


def test_a_peek_finds_what_a_match_finds_and_counts_nothing() -> None:
    with tierkv.open(host_capacity="4 MiB", host_populate=False) as client:
        space = client.open_namespace(spec_of())
        chain = space.chain(tokens_of(3))
        client.put(chain, payloads_of(3))
        before = client.store.totals()
        peeked = Reader(client.store).peek(space.space, space.chain(tokens_of(5)))
        assert (peeked.blocks, peeked.tokens) == (3, 48)
        assert client.store.totals() == before
        found = client.match(space.chain(tokens_of(5)))
        assert (found.blocks, found.tokens, found.tiers) == (peeked.blocks, peeked.tokens, peeked.tiers)
        assert client.store.totals() != before
