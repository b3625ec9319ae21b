"""A daemon with all tiers under real traffic, for whoever looks at it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.client_support import chain_of, payloads_of
from tests.daemon_load import Load, check_lease
from tests.daemon_process import PATIENCE_S, Daemon, running_daemon
from tests.valkey_server import running_server

TOKEN = "a-token-of-more-than-16-characters"
PAUSE_S = 0.01


@contextmanager
def watched_daemon(folder: Path) -> Iterator[Daemon]:
    """Small enough that blocks leave host RAM all the time."""
    with running_server() as server:
        with running_daemon(
            folder,
            token=TOKEN,
            sidecar_http="127.0.0.1:0",
            host_capacity="8 MiB",
            nvme_path=str(folder / "disk"),
            nvme_capacity="64 MiB",
            nvme_min_free=0,
            valkey_url=server.address,
        ) as daemon:
            yield daemon


class Traffic:
    """An engine at work in a thread, with many short prompts and one that all share."""

    def __init__(self, daemon: Daemon, owner: str = "engine") -> None:
        self._daemon = daemon
        self._owner = owner
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="traffic")
        self.failed: list[BaseException] = []

    def _work(self) -> None:
        import tierkv

        try:
            with tierkv.connect(f"unix://{self._daemon.socket}", owner=self._owner) as client:
                load = Load(client, seed=1)
                shared = chain_of(load.space, 8, seed=999)
                while not self._stop.wait(PAUSE_S):
                    load.step()
                    client.put(shared, payloads_of(shared))
                    with client.load(shared, timeout_s=1.0) as lease:
                        check_lease(lease)
                load.let_go()
        except BaseException as error:
            self.failed.append(error)
            raise

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        assert not self.failed

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
