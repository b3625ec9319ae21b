"""The private sidecar of an engine: the first of its processes that needs it starts it, the others find it.

It belongs to the process that started it and dies with it; when it is gone while the engine lives, whoever notices
first starts another. It ends by itself when the last client has left. A lock beside its socket sees to it that of
processes which start at the same time one starts it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tierkv.arguments import checked
from tierkv.config import load_config
from tierkv.daemon.listening import owner_of, try_lock, unlock
from tierkv.daemon.private_child import READY_S, Child
from tierkv.daemon.private_place import place_of, remove_dead, start_lock_of, sweep, takes_connections
from tierkv.daemon.private_settings import compare, environment_of
from tierkv.daemon.remote import RemoteClient
from tierkv.daemon.tenant import Tenant
from tierkv.errors import Away, ClosedError, SidecarError

log = logging.getLogger("tierkv")

_LOOK_S: Final = 0.02
_ASK_S: Final = 5.0
_END_S: Final = 10.0
"""So long the last client waits for the end of a sidecar that its process started."""
_LEAST_PAUSE_S: Final = 1.0
_MOST_PAUSE_S: Final = 60.0
"""Between one start and the next, when it keeps dying."""


class Sidecar:
    """Of one client. Any thread."""

    def __init__(self, name: str, path: Path, given: Mapping[str, str]) -> None:
        self.name = name
        self.path = path
        self.given = given
        """The environment variables that it is started with."""
        self.given_up = threading.Event()
        self.child: Child | None = None
        """Of the sidecar that this client started last."""
        self._pid = os.getpid()
        self._pause_s = 0.0
        self._not_before_s = 0.0

    def find_or_start(self, by_s: float) -> None:
        """Returns when it takes connections. Raises ``SidecarError``."""
        while not takes_connections(self.path):
            lock = start_lock_of(self.path)
            try:
                fd = try_lock(lock)
            except OSError as error:
                raise SidecarError(f"the private sidecar {self.name!r}: {lock}: {error.strerror}") from error
            if fd is not None:
                try:
                    if takes_connections(self.path):  # it came meanwhile
                        return
                    if remove_dead(self.path):  # else an earlier one is just ending
                        self._start(by_s)
                        return
                finally:
                    unlock(lock, fd)
            if time.monotonic() >= by_s or self.given_up.wait(_LOOK_S):
                raise SidecarError(
                    f"the private sidecar {self.name!r} is not there in time: process {owner_of(lock)} is starting it, "
                    f"or an earlier one has not ended yet ({self.path})"
                )

    def _start(self, by_s: float) -> None:
        sweep(self.path.parent)
        child = Child(self.name, self.path, self.given)
        child.wait_ready(by_s, self.given_up)
        self.child = child

    def revive(self) -> None:
        """For a link that has lost it: starts another, but not again and again without a rest."""
        if self.given_up.is_set() or time.monotonic() < self._not_before_s:
            return
        before = self.child
        begun_s = time.monotonic()
        try:
            self.find_or_start(begun_s + READY_S)
        except SidecarError as error:
            if not self.given_up.is_set():
                log.warning("%s", error)
        else:
            if self.child is before:
                return
            log.warning("the private sidecar %r was gone; another one runs, and is empty", self.name)
        rested = begun_s - self._not_before_s > _MOST_PAUSE_S
        self._pause_s = (
            _LEAST_PAUSE_S if rested else min(_MOST_PAUSE_S, max(_LEAST_PAUSE_S, 2 * self._pause_s))
        )
        self._not_before_s = time.monotonic() + self._pause_s

    def wait_end(self) -> None:
        """If it was started here."""
        if self.child is not None and self._pid == os.getpid() and not self.child.wait_end(_END_S):
            log.warning("the private sidecar %r (pid %d) still runs", self.name, self.child.pid)


@checked
class PrivateClient(RemoteClient):
    """Made by ``tierkv.connect(private=...)``."""

    def __init__(self, sidecar: Sidecar, *, owner: str = "client", tenant: Tenant | None = None) -> None:
        super().__init__(str(sidecar.path), owner=owner, tenant=tenant)
        self.sidecar = sidecar
        self.link.revive = sidecar.revive

    def settings(self, by_s: float) -> dict[str, Any]:
        """What the sidecar was started with; see ``tierkv.daemon.private_settings``. Raises ``SidecarError``."""
        while True:
            self.sidecar.find_or_start(by_s)
            try:
                return self.link.call("settings", {}, min(by_s, time.monotonic() + _ASK_S))
            except Away as error:  # it has ended in this moment
                if time.monotonic() >= by_s:
                    raise SidecarError(
                        f"the private sidecar {self.sidecar.name!r} does not answer: {error}"
                    ) from error
            self.sidecar.given_up.wait(_LOOK_S)

    def close(self, timeout_s: float | None = None) -> None:
        """See ``RemoteClient.close``. With the last client the sidecar ends; where this process has started it, that is
        waited for."""
        last = self.link.is_here() and self._is_last()
        if self.link.is_here():
            self.sidecar.given_up.set()
        super().close(timeout_s)
        if last:
            self.sidecar.wait_end()

    def _is_last(self) -> bool:
        if self.sidecar.child is None:
            return False
        try:
            return bool(self.link.call("settings", {}, self._soon_s())["sessions"] == 1)
        except (Away, ClosedError):
            return False


def connect_private(
    name: str, owner: str, settings: Mapping[str, Any], tenant: Tenant | None = None
) -> PrivateClient:
    """See ``tierkv.connect``. Raises ``ConfigError`` and ``SidecarError``."""
    config = load_config(None, **settings)
    given = environment_of(settings, os.environ)
    sidecar = Sidecar(name, place_of(name, os.environ), given)
    client = PrivateClient(sidecar, owner=owner, tenant=tenant)
    fits = False
    try:
        told = client.settings(time.monotonic() + READY_S)
        if settings:
            compare(name, config, told)
        client.sidecar.given = told["given"]
        fits = True
        return client
    finally:
        if not fits:
            client.close()
