"""An engine whose keys and values go through a sidecar: the demo's model, asked about its texts in turn.

    tierkv serve --socket /tmp/tierkv.sock &
    python shared_engine.py --sidecar unix:///tmp/tierkv.sock --rounds 2

Needs tierkv-store[demo] and the model, see docs/demo.md. What the sidecar has of a prompt is not computed again;
without a sidecar all of it is, and the words are the same. Exit status 1 when a question got another answer than the
first time.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from itertools import count

import tierkv
from tierkv.demo.engine import GREEDY, load
from tierkv.demo.questions import HANDBOOK, SHORTER
from tierkv.engines.transformers import Connector

STORE_S = 60.0
QUESTIONS = [(reading, question) for reading in (HANDBOOK, *SHORTER) for question in reading.questions]


def main() -> int:
    options = _options()
    ended = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: ended.set())
    loaded = load(_say)
    answers: dict[str, str] = {}
    with tierkv.connect(options.sidecar, owner="shared_engine.py") as client:
        connector = Connector(client, loaded.model, loaded.weights, block_tokens=loaded.block_tokens)
        for number in count(1) if options.rounds == 0 else range(1, options.rounds + 1):
            for reading, question in QUESTIONS:
                prompt = reading.prompt(loaded.tokenizer, question)
                made = connector.generate(prompt, **GREEDY)
                made.stored.result(STORE_S)
                words = loaded.tokenizer.decode(made.tokens[prompt.shape[1] :], skip_special_tokens=True)
                _say(
                    f"round {number}, {reading.name}: {made.reused_tokens} of {prompt.shape[1]} tokens reused, "
                    f"first token after {made.first_token_s:.2f} s: {words.strip()}"
                )
                if answers.setdefault(question, words) != words:
                    _say(f"WRONG: the first answer was {answers[question].strip()}")
                    return 1
                if ended.wait(options.pause):
                    return 0
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--sidecar", default="unix:///run/tierkv/tierkv.sock", help="unix:///path (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=0, help="times to ask all questions; 0: until SIGTERM")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between questions (%(default)s)")
    return parser.parse_args()


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
