"""``tierkv version``: what is installed."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence

from tierkv import __version__


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tierkv version", description="Print the version.")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    if parser.parse_args(argv).json:
        print(
            json.dumps(
                {"tierkv": __version__, "python": platform.python_version(), "system": platform.platform()}
            )
        )
    else:
        print(f"tierkv {__version__}")
    return 0
