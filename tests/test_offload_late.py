"""An offload whose copy ends after the store or the client was closed: its future ends too."""

import threading
from pathlib import Path

import numpy as np

import tierkv
from tests.daemon_process import running_daemon
from tierkv.copier import LayerPages, PagedKV

GROUP = tierkv.LayerGroup("all", tierkv.GroupKind.FULL, layers=2, page_bytes=8192, engine_block_tokens=16)
LAYOUT = tierkv.Layout("pages", "float16", hash_tokens=16, groups=(GROUP,))
SPEC = tierkv.NamespaceSpec(weights=tierkv.Weights("revision", "v1"), layout=LAYOUT, engine="tests")


class Gate:
    """The engine has not finished its pages until somebody opens it."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)


def closed_meanwhile(client: tierkv.Client) -> tierkv.Stored:
    memory = [np.full((8, 8192), layer, np.uint8) for layer in range(2)]
    kv = PagedKV(groups=(tuple(LayerPages((pages,)) for pages in memory),))
    chain = client.open_namespace(SPEC).chain(np.arange(33))
    gate = Gate()
    future = client.offload(kv, [[[1]], [[2]]], chain, ready=gate)
    assert gate.reached.wait(60)
    client.close(0.2)
    gate.opened.set()
    return future.result(60)


def test_d13_a_store_that_was_closed_tells_whose_copy_ends_late() -> None:
    stored = closed_meanwhile(tierkv.open(host_capacity="16 MiB"))
    assert (stored.stored, sum(stored.dropped.values())) == (0, 2)


def test_d13_so_does_the_client_of_a_daemon(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        stored = closed_meanwhile(tierkv.connect(f"unix://{daemon.socket}"))
    assert (stored.stored, sum(stored.dropped.values())) == (0, 2)
