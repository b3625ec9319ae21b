"""After ``close`` every verb raises the same ``ClosedError``: of a store in this process, and of a daemon's."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.client_support import chain_of, live, payloads_of, put_all, spec_of
from tierkv.aio import AsyncVerbs
from tierkv.copier import LayerPages, PagedKV
from tierkv.errors import ClosedError

pytestmark = pytest.mark.usefixtures("face")


class Given(NamedTuple):
    """What a verb takes by place, and by name."""

    places: tuple[Any, ...] = ()
    names: dict[str, Any] = {}


def verbs_of(client: Any) -> Iterator[str]:
    for name in dir(client):
        attribute = inspect.getattr_static(client, name)
        if not name.startswith("_") and inspect.isfunction(attribute):
            yield name


def test_every_verb_of_a_closed_client_raises_the_same(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path) as rig:
        space = rig.namespace()
        chain, other = chain_of(space, 1), chain_of(space, 1, seed=1)
        put_all(rig.client, chain)
        lease, draft = rig.client.load(chain), rig.client.reserve(other)
        assert draft is not None
        sealed = draft.seal()
        kv = PagedKV(((LayerPages((np.zeros((2, 4096), np.uint8),)),),))
        of_chain, of_tier = Given((chain,)), Given(("nvme",))
        given = {
            "open_namespace": Given((spec_of(),)),
            "opened": Given((space.namespace.digest,)),
            "adopt": Given((space.namespace.digest,)),
            "match": of_chain,
            "prefetch": of_chain,
            "load_async": of_chain,
            "load": of_chain,
            "explain": of_chain,
            "reserve": Given((other,)),
            "commit": Given((sealed, other)),
            "put": Given((chain, payloads_of(chain))),
            "announce": of_chain,
            "watch": of_chain,
            "offload": Given((kv, [[(0,)]], chain)),
            "onboard": Given((lease, kv, [[(0,)]])),
            "pin": of_chain,
            "unpin": of_chain,
            "flush": of_tier,
            "evict": of_tier,
            "clear": Given(),
            "bump_epoch": Given((space,)),
            "sleep": Given(names={"keep": True}),
            "wake": Given(),
            "report_prefill": Given((16, 0.1)),
            "stats": Given(),
            "health": Given(),
            "events": Given(),
        }
        rig.client.close()
        for name in verbs_of(rig.client):
            if name == "close":
                continue
            its = given[name]
            with pytest.raises(ClosedError, match=r"^this client was closed$"):
                getattr(rig.client, name)(*its.places, **its.names)
        for name in verbs_of(AsyncVerbs(rig.client)):
            its = given[name]
            with pytest.raises(ClosedError, match=r"^this client was closed$"):
                asyncio.run(getattr(rig.client.aio, name)(*its.places, **its.names))
        rig.client.close()
        sealed.drop()
        lease.release()
