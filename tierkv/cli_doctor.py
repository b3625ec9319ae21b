"""``tierkv doctor``: tries all that the configuration names, and says what to change. ``tierkv doctor vllm`` looks at
an engine instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tierkv.cli_ask import JsonParser, errors_as_json
from tierkv.cli_probes import Finding, disk, gpu, memory, server, sockets, tell
from tierkv.config import FILE_ENV, Config, load_config
from tierkv.config_memory import Machine


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["vllm"]:
        from tierkv.engines import vllm_doctor

        return vllm_doctor.main(argv[1:])
    parser = JsonParser(
        prog="tierkv doctor",
        description="Try all that the configuration names, and say what to change. The status is 1 when something will "
        "not work. Takes a few seconds, writes up to 256 MiB to the disk and 16 MiB to the server, and leaves nothing "
        "there. tierkv doctor vllm looks at an installed vLLM and its options.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"tierkv.toml (default: {FILE_ENV})")
    parser.add_argument("--json", action="store_true", help="as one JSON object, errors too")
    arguments = parser.parse_args(argv)
    with errors_as_json(arguments):
        config = load_config(arguments.config)
    return tell(examine(config), as_json=arguments.json)


def examine(config: Config) -> Iterator[Finding]:
    yield from memory(config, Machine())
    if config.nvme is not None:
        yield from disk(config.nvme)
    if config.valkey is not None:
        yield from server(config.valkey)
    yield gpu()
    yield from sockets(config.sidecar)
    for note in config.notes:
        yield Finding("configuration", "note", note)
