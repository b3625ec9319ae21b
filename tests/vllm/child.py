"""One scenario in a process of its own: ``python -m tests.vllm.child MODULE.NAME '{"argument": ...}'``."""

from __future__ import annotations

import faulthandler
import json
import sys
from importlib import import_module

RESULT = "RESULT "
ANSWER = "ANSWER "


def main() -> None:
    faulthandler.enable()
    where, name = sys.argv[1].rsplit(".", 1)
    scenario = getattr(import_module(f"tests.vllm.{where}"), name)
    result = scenario(**json.loads(sys.argv[2]))
    print(f"{RESULT}{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
