"""When a daemon ends: at a signal, with the process that it belongs to, when nobody uses it any more."""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections.abc import Callable, Sized

from tierkv.errors import ConfigError

log = logging.getLogger("tierkv")

LINGER_S = 5.0
"""A client whose connection broke may be back by then."""
LOOK_S = 5.0
"""A signal that another thread has taken is noticed by then."""


class Ending:
    """Made before anything else, so that a signal which comes early counts. ``on_empty`` may be called by any thread,
    the rest by the main thread."""

    def __init__(self) -> None:
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._empty = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._linger_s = LINGER_S
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os.eventfd_write(self._stop, 1))

    def on_empty(self, for_good: bool) -> None:
        """There is no session any more."""
        self._linger_s = 0.0 if for_good else LINGER_S
        os.eventfd_write(self._empty, 1)

    def wait(self, parent: int | None, sessions: Callable[[], Sized], *, while_used: bool) -> str:
        """Returns why it ends, in words. ``parent``: the id of the process that it ends with. ``while_used``: it ends
        when the last session is over, after the first one has been there. Raises ``ConfigError`` for a process that
        cannot be watched."""
        watched = [self._stop, self._empty] if while_used else [self._stop]
        gone = f"process {parent}, whose sidecar this is, has ended"
        life = None
        if parent is not None:
            life = _life_of(parent)
            if life is None:
                return gone
            watched.append(life)
        until_s = float("inf")
        while True:
            ready, _, _ = select.select(watched, [], [], max(0.0, min(LOOK_S, until_s - time.monotonic())))
            if self._stop in ready:
                return "stopping"
            if life in ready:
                return gone
            if self._empty in ready:
                os.eventfd_read(self._empty)
                until_s = time.monotonic() + self._linger_s
            if time.monotonic() >= until_s:
                if not len(sessions()):
                    return "nobody uses it any more"
                until_s = float("inf")


def _life_of(process: int) -> int | None:
    """A descriptor that becomes readable when the process ends, whichever thread of it has started this one and whoever
    stands between the two; ``None`` when it has ended."""
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        return None
    except OSError as error:
        raise ConfigError(
            "--with-parent", process, f"the process cannot be watched: {error.strerror}"
        ) from None
