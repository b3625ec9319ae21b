"""``tierkv serve``: a store that engines on this host share."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tierkv.assembly import store_from
from tierkv.config import load_config
from tierkv.config_sidecar import read_token
from tierkv.daemon.ending import Ending
from tierkv.daemon.operator import Operator
from tierkv.daemon.private_settings import settings_verb
from tierkv.daemon.server import Server
from tierkv.daemon.traffic_verb import traffic_verb
from tierkv.tuning import leave_the_parents_cores, tune_interpreter, tune_malloc

log = logging.getLogger("tierkv")


def main(argv: Sequence[str]) -> int:
    """Until SIGTERM or SIGINT. What keeps it from starting: ``ConfigError``, ``AddressInUse``, ``TierError``."""
    options = _parser().parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    _quiet_others()
    tune_malloc()
    if options.with_parent is not None:
        leave_the_parents_cores(options.with_parent)
    ending = Ending()
    config = load_config(options.config, **_given(options))
    sidecar = config.sidecar
    token = read_token(sidecar.token_file, os.environ)
    for note in config.notes:
        log.info("%s", note)
    with ExitStack() as undo:
        store = store_from(config, shared=True)
        server = Server(store, sidecar.socket, mode=sidecar.mode, group=sidecar.group)
        operator = Operator(store, config, server.sessions)
        server.verbs["ask"] = operator.answer
        server.verbs["requests"] = traffic_verb(store.traffic)
        server.on_empty = ending.on_empty
        if options.while_used:
            server.verbs["settings"] = settings_verb(config, os.environ, server.sessions)
        # In the other order: nobody new comes in, whoever waits for the store is answered, the sessions end.
        undo.callback(server.close)
        undo.callback(store.close)
        server.start()
        undo.callback(server.stop)
        if sidecar.http is not None:
            from tierkv.daemon.http import (
                HttpFace,
            )  # its libraries take a while, and who has no HTTP needs none

            face = HttpFace(operator, server.sessions, sidecar, token, store.clock)
            undo.callback(face.close)
            face.start()
            log.info("HTTP on %s", face.address)
        tune_interpreter()
        notify("READY=1")
        log.info("serving on %s", sidecar.socket)
        why = ending.wait(options.with_parent, server.sessions, while_used=options.while_used)
        notify("STOPPING=1")
        log.info("%s", why)
    return 0


def notify(state: str) -> None:
    """Tells systemd, where it listens (sd_notify)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto(state.encode(), address)
        except OSError as error:
            print(f"tierkv serve: systemd could not be told: {error}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tierkv serve", description="A store that engines on this host share."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="tierkv.toml")
    parser.add_argument("--socket", metavar="PATH", help="instead of sidecar.socket")
    parser.add_argument("--mode", help="instead of sidecar.mode")
    parser.add_argument("--group", help="instead of sidecar.group")
    parser.add_argument("--http", metavar="WHERE", help="instead of sidecar.http")
    parser.add_argument("--with-parent", type=int, metavar="PID", help="end when this process does")
    parser.add_argument("--while-used", action="store_true", help="end when the last client has left")
    return parser


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line has."""
    given = {f"sidecar_{name}": getattr(options, name) for name in ("socket", "mode", "group", "http")}
    return {name: value for name, value in given.items() if value is not None}


def _quiet_others() -> None:
    """Of libraries only what is wrong."""
    for name in ("asyncio", "aiohttp", "valkey"):
        logging.getLogger(name).setLevel(logging.WARNING)
