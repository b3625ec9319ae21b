"""``tierkv match``, ``explain``, ``pin`` and ``clear``: a daemon's blocks, asked about and dealt with by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tierkv.cli_ask import add_prompt, parser_of, prompt_words, run, seconds
from tierkv.errors import ConfigError
from tierkv.units import format_bytes

Answer = dict[str, Any]


def match(argv: Sequence[str]) -> int:
    parser = parser_of("match", "How much of a prompt need not be computed. Counts as no request.")
    add_prompt(parser)
    arguments = parser.parse_args(argv)
    return run("match", arguments, lambda: prompt_words(arguments), _show_match)


def explain(argv: Sequence[str]) -> int:
    parser = parser_of("explain", "Why blocks of a prompt are a miss.")
    add_prompt(parser)
    arguments = parser.parse_args(argv)
    return run(
        "explain", arguments, lambda: prompt_words(arguments), lambda answer: answer["text"].split("\n")
    )


def pin(argv: Sequence[str]) -> int:
    parser = parser_of("pin", "Load a prompt's blocks and keep them in host RAM.")
    add_prompt(parser)
    parser.add_argument("--off", action="store_true", help="let them go again")
    parser.add_argument(
        "--ttl", type=seconds, metavar="TIME", help="for so long, such as '10 min' (default: until --off)"
    )
    parser.add_argument(
        "--timeout", type=seconds, metavar="TIME", help="for loading (default: limits.load_deadline)"
    )
    arguments = parser.parse_args(argv)
    if arguments.off:
        if arguments.ttl is not None or arguments.timeout is not None:
            parser.error("--off takes neither --ttl nor --timeout")
        return run("unpin", arguments, lambda: prompt_words(arguments), _show_unpin)
    times = {"ttl_s": arguments.ttl, "timeout_s": arguments.timeout}
    given = {name: value for name, value in times.items() if value is not None}
    return run("pin", arguments, lambda: {**prompt_words(arguments), **given}, _show_pin)


def clear(argv: Sequence[str]) -> int:
    parser = parser_of(
        "clear", "Forget blocks in every tier. The status is 1 when some could still be found afterwards."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--namespace", metavar="HEX", help="one namespace: its digest, or the first digits of it"
    )
    what.add_argument(
        "--tenant-salt-file", metavar="FILE", help="all of a tenant, whose salt is in this file"
    )
    what.add_argument("--everything", action="store_true", help="all there is")
    parser.add_argument("--timeout", type=seconds, default=30.0, metavar="TIME", help="default 30 s")
    arguments = parser.parse_args(argv)

    def words() -> Answer:
        if arguments.everything:
            return {"everything": True, "timeout_s": arguments.timeout}
        if arguments.namespace is not None:
            return {"namespace": arguments.namespace, "timeout_s": arguments.timeout}
        return {"tenant_salt": _salt(arguments.tenant_salt_file), "timeout_s": arguments.timeout}

    return run("clear", arguments, words, _show_clear, fine=lambda answer: bool(answer["complete"]))


def _salt(name: str) -> str:
    """From a file, since the words of a command can be read by everybody on the machine."""
    try:
        with open(name) as file:
            return file.read().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError("--tenant-salt-file", name, f"{reason}; name a file with the salt") from None


def _show_match(answer: Answer) -> Iterator[str]:
    where = ", ".join(f"{count} in {tier}" for tier, count in answer["tiers"].items() if count)
    yield f"{answer['blocks']} of {answer['of_blocks']} blocks, {answer['tokens']} tokens need not be computed"
    if where:
        yield where


def _show_pin(answer: Answer) -> Iterator[str]:
    yield f"{answer['pinned']} of {answer['blocks']} blocks are pinned"
    yield _budget(answer)


def _show_unpin(answer: Answer) -> Iterator[str]:
    yield f"{answer['unpinned']} blocks were pinned and are not any more"
    yield _budget(answer)


def _budget(answer: Answer) -> str:
    used, budget = (format_bytes(answer["budget"][name]) for name in ("pinned_bytes", "budget_bytes"))
    return f"{used} of {budget} of host.pin_budget are used"


def _show_clear(answer: Answer) -> Iterator[str]:
    for tier, result in answer["tiers"].items():
        state = "all of it is gone" if result["complete"] else "some can still be found"
        detail = f": {result['detail']}" if result["detail"] else ""
        yield f"{tier}: {result['removed']} blocks removed, {state}{detail}"
        yield from (f"  still held: {one}" for one in result["kept"])
