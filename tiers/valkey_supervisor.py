"""Keeps one private server exactly as long as its owner lives. Run as a script; needs nothing but the standard library.

    python valkey_supervisor.py OWNER_PID OWNER_PIDFD LOCK_FD DIRECTORY SERVER ARGUMENT...

The owner dies at any time and in any way, ``kill -9`` included, and neither the server nor its directory may stay. So
this process stands between the two and watches the owner in three ways, for each alone has a hole:

- Standard input is a pipe whose other end only the owner holds. Its end of file is the orderly way to stop. But a child
  that the owner has forked holds that end too.
- A pidfd of the owner, where the kernel has them.
- The id of the parent, once a second: it changes when the owner is gone.

Should this process itself be killed, the kernel kills the server (PR_SET_PDEATHSIG; its trap, that it fires when the
thread dies which forked, does not exist here: there is one thread).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LOOK_MS = 1000


def main(arguments: list[str]) -> int:
    owner, owner_fd, lock_fd, directory, *server = arguments
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, _stop)
    if int(owner_fd) >= 0:
        os.set_inheritable(int(owner_fd), False)
    os.set_inheritable(int(lock_fd), False)
    child = 0
    try:
        child = _spawn(server)
        _watch(int(owner), int(owner_fd), child)
    finally:
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(name, signal.SIG_IGN)
        if child:
            _end(child)
        remove(directory)
    return 0


def remove(directory: str) -> None:
    """Removes the flat, private directory of a server. What is gone already is fine."""
    try:
        for name in os.listdir(directory):
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
    except FileNotFoundError:
        pass


def _stop(_signal: int, _frame: object) -> None:
    raise SystemExit(0)


def _spawn(server: list[str]) -> int:
    """Forks and becomes ``server`` in the child. This process has one thread, so that a plain fork is safe."""
    libc = ctypes.CDLL(None, use_errno=True)
    supervisor = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(name, signal.SIG_DFL)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or os.getppid() != supervisor:
            os._exit(126)  # it died between the fork and the request, which then comes too late
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execv(server[0], server)
    except OSError as error:
        os.write(2, f"{server[0]}: {error}\n".encode())
    os._exit(127)


def _watch(owner: int, owner_fd: int, child: int) -> None:
    """Returns when the owner or the server is gone."""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    for fd in (owner_fd, _pidfd(child)):
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    while os.getppid() == owner and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if poll.poll(_LOOK_MS):
            return


def _pidfd(process: int) -> int:
    try:
        return os.pidfd_open(process)
    except OSError:
        return -1  # a kernel without them: then the look once a second has to do


def _end(child: int) -> None:
    """At once: the server keeps nothing that it would have to save."""
    try:
        os.kill(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    os.waitpid(child, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
