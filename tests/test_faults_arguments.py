"""Wrong arguments: an error that names the verb, the argument, the value and the way out, and nothing is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.client_support import Live, chain_of, live, loaded, payloads_of, put_all
from tierkv.client import Client
from tierkv.copier import LayerPages, PagedKV
from tierkv.errors import ArgumentError, TierKVError
from tierkv.keys import Chain
from tierkv.testing import faults

Call = Callable[[Client, Chain], Any]


@pytest.fixture(scope="module")
def rig() -> Iterator[Live]:
    with live(8) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 3))
        yield rig


def memory() -> PagedKV:
    return PagedKV(groups=((LayerPages((np.zeros((8, 4096), np.uint8),)),),))


STRANGE: list[Any] = [
    None,
    3,
    -1,
    2.5,
    math.nan,
    "word",
    b"bytes",
    [],
    ["x"],
    [None],
    {},
    object(),
    np.zeros(3),
    True,
    10**400,
]

WRONG: list[tuple[str, Call, str]] = [
    ("match chain", lambda c, chain: c.match([1, 2, 3]), r"match: chain = \[1, 2, 3\]: give a chain, made by"),
    ("match None", lambda c, chain: c.match(None), "match: chain = None"),
    ("match tokens", lambda c, chain: c.match(chain, local_computed="7"), "local_computed = '7': give an integer"),
    ("match negative", lambda c, chain: c.match(chain, local_computed=-1), "local_computed = -1: .* at least 0"),
    ("prefetch time", lambda c, chain: c.prefetch(chain, timeout_s="1"), "timeout_s = '1': give seconds"),
    ("load time", lambda c, chain: c.load(chain, timeout_s=math.nan), "load: timeout_s = nan"),
    ("load endless", lambda c, chain: c.load(chain, timeout_s=10**400), "load: timeout_s = 1000.*give seconds"),
    ("load owner", lambda c, chain: c.load(chain, owner=7), "load: owner = 7: give a string"),
    ("load retention", lambda c, chain: c.load_async(chain, retention=3), "retention = 3: give a Retention"),
    ("put payloads", lambda c, chain: c.put(chain, b"x" * 4096), "put: payloads = b'xxx.*: give a list"),
    ("put first", lambda c, chain: c.put(chain, [b""], first="0"), "put: first = '0'"),
    ("put True", lambda c, chain: c.put(chain, [b""], first=True), "put: first = True"),
    ("put rank", lambda c, chain: c.put(chain, [b""], rank=None), "put: rank = None"),
    ("put absent", lambda c, chain: c.put(chain, [b""], absent=["window"]), "put: absent = .*list of integers"),
    ("put no bytes", lambda c, chain: c.put(chain, [7], first=0), "put: block 0 = 7: give its bytes"),
    ("put strided", lambda c, chain: c.put(chain, [np.zeros((4096, 2), np.uint8)[:, 0]]), "put: block 0 = .*C order"),
    ("reserve count", lambda c, chain: c.reserve(chain, count=1.5), "reserve: count = 1.5"),
    ("commit", lambda c, chain: c.commit(chain, chain), "commit: sealed = .*Draft.seal"),
    ("offload kv", lambda c, chain: c.offload("kv", [[[0]]], chain), "offload: kv = 'kv': give a PagedKV"),
    ("offload pages", lambda c, chain: c.offload(memory(), 3, chain), "offload: pages = 3"),
    ("offload flat", lambda c, chain: c.offload(memory(), [0, 1, 2], chain), "offload: block 0 = 0: give its pages"),
    ("offload ready", lambda c, chain: c.offload(memory(), [[[0]]], chain, ready=1), "ready = 1: .*synchronize"),
    ("onboard lease", lambda c, chain: c.onboard(chain, memory(), []), "onboard: lease = "),
    ("pin time", lambda c, chain: c.pin(chain, ttl_s="x"), "pin: ttl_s = 'x'"),
    ("flush tier", lambda c, chain: c.flush(1), "flush: tier = 1: give a tier's name"),
    ("flush time", lambda c, chain: c.flush("host", timeout_s=None), "flush: timeout_s = None"),
    ("evict tier", lambda c, chain: c.evict(None), "evict: tier = None"),
    ("evict namespace", lambda c, chain: c.evict("host", namespace="n"), "evict: namespace = 'n'"),
    ("clear namespace", lambda c, chain: c.clear(namespace=chain), "clear: namespace = .*open_namespace"),
    ("clear salt", lambda c, chain: c.clear(tenant_salt=b"x"), "clear: tenant_salt = b'x'"),
    ("bump", lambda c, chain: c.bump_epoch(chain), "bump_epoch: namespace = "),
    ("sleep", lambda c, chain: c.sleep(keep="yes"), "sleep: keep = 'yes': give True or False"),
    ("events", lambda c, chain: c.events("0"), "events: after = '0'"),
    ("namespace", lambda c, chain: c.open_namespace({"weights": 1}), "open_namespace: spec = .*NamespaceSpec"),
    ("ranks", lambda c, chain: c.open_namespace(chain.namespace.spec, ranks=[0.5]), "open_namespace: ranks"),
    ("prefill", lambda c, chain: c.report_prefill("7", 1.0), "report_prefill: tokens"),
    ("close", lambda c, chain: c.close("now"), "close: timeout_s = 'now'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "says"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_d29_a_wrong_argument_is_named_and_nothing_is_done(rig: Live, call: Call, says: str) -> None:
    chain = chain_of(rig.namespace(), 3)
    other = chain_of(rig.namespace(), 3, seed=9)
    with pytest.raises(ArgumentError, match=says):
        call(rig.client, other if "block 0" in says else chain)
    faults.assert_nothing_left(rig.store)
    assert rig.client.match(other).blocks == 0
    assert loaded(rig.client, chain) == 3


VERBS: list[tuple[str, str, Callable[[Client, Chain, Any], Any]]] = [
    ("match", "local_computed", lambda c, chain, value: c.match(chain, local_computed=value)),
    ("load", "timeout_s", lambda c, chain, value: c.load(chain, timeout_s=value).release()),
    ("put", "payloads", lambda c, chain, value: c.put(chain, value)),
    ("put", "one payload", lambda c, chain, value: c.put(chain, [value])),
    ("put", "first", lambda c, chain, value: c.put(chain, [b"x" * 4096], first=value)),
    ("put", "absent", lambda c, chain, value: c.put(chain, [b"x" * 4096], absent=value)),
    ("reserve", "count", lambda c, chain, value: c.reserve(chain, count=value).drop()),
    ("offload", "pages", lambda c, chain, value: c.offload(memory(), value, chain).result(10)),
    ("offload", "one page", lambda c, chain, value: c.offload(memory(), [value], chain).result(10)),
    ("flush", "tier", lambda c, chain, value: c.flush(value)),
    ("evict", "namespace", lambda c, chain, value: c.evict("host", namespace=value)),
    ("explain", "hashes", lambda c, chain, value: c.explain(namespace=chain.namespace, hashes=value)),
    ("match", "chain", lambda c, chain, value: c.match(value)),
]


@pytest.mark.parametrize(("verb", "argument", "call"), VERBS, ids=[f"{row[0]} {row[1]}" for row in VERBS])
def test_d29_whatever_is_given_the_error_is_ours_or_there_is_none(
    verb: str, argument: str, call: Callable[[Client, Chain, Any], Any]
) -> None:
    said: list[str] = []
    with live(8) as rig:
        for value in STRANGE:
            chain = chain_of(rig.namespace(), 3)
            try:
                call(rig.client, chain, value)
            except TierKVError as error:
                said.append(str(error))
        rig.settle()
        rig.store.intake.collect_orphans()
        assert len(said) > len(STRANGE) / 2, f"{verb} takes almost anything as {argument}"
        assert all(said)
        faults.assert_nothing_left(rig.store)


def test_numpy_numbers_and_ranges_are_as_good_as_pythons(rig: Live) -> None:
    chain = chain_of(rig.namespace(), 3)
    assert rig.client.match(chain, local_computed=np.int64(0)).blocks == 3
    with rig.client.load(chain, timeout_s=np.float32(1.0)) as lease:
        assert len(lease) == 3
    resident = rig.client.put(chain, payloads_of(chain, [1]), first=np.int32(1), absent=range(0))
    assert resident.resident == 1
