"""A proxy before a server in a process of its own, so that its threads take no interpreter time from the store's.

python -m bench.soak_proxy PORT          passes 127.0.0.1 to PORT; prints its own port, then obeys lines on stdin:
{"bytes_per_s": 100000}                  sets what ``TcpProxy`` has, {} heals
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tierkv.testing.faults.proxy import proxy_before


class Link:
    """The proxy as its parent sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.port = int(process.stdout.readline())

    def spoil(self, **faults: float | bool) -> None:
        """Sets attributes of the proxy; without any it is healed and all connections end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(faults) + "\n")
        self._process.stdin.flush()

    def heal(self) -> None:
        self.spoil()


@contextmanager
def link_to(port: int) -> Iterator[Link]:
    """A proxy process before 127.0.0.1:``port``."""
    command = [sys.executable, "-m", "bench.soak_proxy", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Link(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(10)


def main() -> None:
    with proxy_before(("127.0.0.1", int(sys.argv[1]))) as proxy:
        print(proxy.port, flush=True)
        for line in sys.stdin:
            faults = json.loads(line)
            if not faults:
                proxy.heal()
            for name, value in faults.items():
                setattr(proxy, name, value)


if __name__ == "__main__":
    main()
