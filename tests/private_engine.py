"""A process of an engine with a private sidecar, for tests: ``python -m tests.private_engine ID [SETTING=VALUE ...]``.

It prints ``{"sidecar": pid, "started": bool, "socket": path}`` when it is connected, and then does what each line of
standard input says, one line of output for each.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import tierkv
from tests.daemon_process import payloads_of, spec_of, tokens_of


def main(arguments: list[str]) -> None:
    name, *pairs = arguments
    settings: dict[str, Any] = dict(pair.split("=", 1) for pair in pairs)
    clients: list[Any] = []

    def connect() -> None:
        clients.append(tierkv.connect(private=name, **settings))

    thread = threading.Thread(target=connect)  # it ends at once: the sidecar belongs to the process
    thread.start()
    thread.join()
    client = clients[0]
    told = client.link.call("settings", {}, client._soon_s())
    started = client.sidecar.child is not None
    say({"sidecar": told["pid"], "started": started, "socket": str(client.sidecar.path)})
    chain = client.open_namespace(spec_of()).chain(tokens_of(2))
    for line in sys.stdin:
        match line.strip():
            case "put":
                say(client.put(chain, payloads_of(2)).stored)
            case "count":
                say(client.match(chain).blocks)
            case "announce":
                say(client.announce(chain).accepted)
            case "close":
                client.close()
                say("closed")
            case "raise":
                raise RuntimeError("as the test wants it")
            case "exit":
                os._exit(0)


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
