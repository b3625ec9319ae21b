"""What a vLLM engine says when it starts, and what is refused before: options, and the doctor that looks at them."""

from __future__ import annotations

import argparse
import io
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.stand_in_vllm import worker_modules
from tests.valkey_server import eventually
from tierkv.engines import vllm_doctor
from tierkv.engines.vllm_logs import say_what_is_on, speak_as_vllm
from tierkv.engines.vllm_names import Names
from tierkv.engines.vllm_options import Options, options_of
from tierkv.errors import ConfigError
from tierkv.layout import GroupKind, LayerGroup, Layout

identity = worker_modules()["vllm_identity"]
LAYOUT = Layout("pages", "float32", 16, (LayerGroup("all", GroupKind.FULL, 4, 65_536, 16),), 2)
PATIENCE_S = 20.0


@contextmanager
def as_vllm_logs(level: int = logging.INFO) -> Iterator[io.StringIO]:
    """As vLLM sets its logger up, in a process where nobody has said anything of others."""
    root, own, its = logging.getLogger(), logging.getLogger("tierkv"), logging.getLogger("vllm")
    before = {log: (log.handlers[:], log.level, log.propagate) for log in (root, own, its)}
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(levelname)s [vllm] %(message)s"))
    for log in before:
        log.handlers = []
    own.setLevel(logging.NOTSET)
    its.handlers, its.propagate = [handler], False
    its.setLevel(level)
    try:
        yield text
    finally:
        for log, (handlers, was, propagate) in before.items():
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(was)


def test_tierkvs_lines_stand_among_vllms() -> None:
    """They were seen nowhere when they were no warnings, and without vLLM's form when they were."""
    with as_vllm_logs() as text:
        speak_as_vllm()
        speak_as_vllm()  # vLLM makes several connectors in a process
        say_what_is_on(LAYOUT, Options(), "/run/one.sock")
    [line] = text.getvalue().splitlines()
    assert line.startswith("INFO [vllm] ")


def test_who_has_said_what_becomes_of_tierkvs_lines_is_heard() -> None:
    with as_vllm_logs() as text:
        mine = io.StringIO()
        logging.getLogger("tierkv").addHandler(logging.StreamHandler(mine))
        speak_as_vllm()
        logging.getLogger("tierkv").warning("a line")
    assert (text.getvalue(), mine.getvalue()) == ("", "a line\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(), "saved to and loaded from a private sidecar with 1 GiB of host RAM;"),
        (
            Options(settings={"host_capacity": "2 GiB", "nvme_path": "/tmp", "nvme_capacity": "8 GiB"}),
            "a private sidecar with 2 GiB of host RAM, 8 GiB in /tmp;",
        ),
        (Options(socket="unix:///run/one.sock", load=False), "are saved to a shared sidecar;"),
        (Options(socket="unix:///run/one.sock", save=False), "are loaded from a shared sidecar;"),
    ],
)
def test_one_line_at_the_start_says_what_is_on_and_where(
    options: Options, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tierkv"):
        say_what_is_on(LAYOUT, options, "/run/one.sock")
    [line] = caplog.messages
    assert words in line
    assert "32 tokens (512 KiB)" in line
    assert "tierkv status --socket /run/one.sock" in line


def test_the_end_of_a_long_digest_is_told(caplog: pytest.LogCaptureFixture) -> None:
    digested, client = threading.Event(), SimpleNamespace(open_namespace=lambda spec: spec)

    def weights() -> Any:
        digested.wait(PATIENCE_S)
        return "weights"

    names = Names(client, weights, lambda *_: "spec", lambda its: its)  # type: ignore[arg-type, return-value]
    with caplog.at_level(logging.INFO, "tierkv"):
        names.find(0.01)
        assert [line.partition(";")[0] for line in caplog.messages] == [
            "vLLM: the weights are being digested"
        ]
        digested.set()
        eventually(lambda: len(caplog.messages) == 2, "the end is told", PATIENCE_S)
    assert caplog.messages[1] == "vLLM: the weights are digested; blocks are stored and loaded from now on"


def findings_of(extra: Any) -> dict[str, vllm_doctor.Finding]:
    transfer = {**vllm_doctor.CONNECTOR, "kv_connector_extra_config": extra}
    arguments = argparse.Namespace(
        kv_transfer_config=json.dumps(transfer), prefix_caching_hash_algo="sha256",
        disable_hybrid_kv_cache_manager=False, no_enable_prefix_caching=False, mm_processor_cache_gb=4.0,
    )  # fmt: skip
    return {found.about: found for found in vllm_doctor.configured(arguments)}


@pytest.mark.parametrize(
    "extra",
    [
        ["host_capacity"],
        "host_capacity",
        {"salt": "a", "quotas": {"host": "much"}},
        {"quotas": {"host": "1 GiB"}},
    ],
)
def test_what_an_engine_would_refuse_the_doctor_calls_bad(extra: Any) -> None:
    """A list ended it with a traceback, and quotas were looked at by the engine alone."""
    assert findings_of(extra)["options"].level == "bad"
    with pytest.raises(ConfigError):
        options_of(extra, producer=True, consumer=True)


def test_the_doctor_tries_what_a_private_sidecar_will_use(tmp_path: Path) -> None:
    found = findings_of(
        {"host_capacity": "16 MiB", "nvme_path": str(tmp_path / "cache"), "nvme_capacity": "64 MiB"}
    )
    assert (
        found["sidecar"].text == f"a private sidecar with 16 MiB of host RAM, 64 MiB in {tmp_path / 'cache'}"
    )
    assert found["memory"].level == "ok"
    assert "nvme space" in found
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("tokens", [8, 24, 33])
def test_blocks_that_cut_a_hash_in_two_are_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match="a multiple of 16"):
        identity.engine_blocks_of(Options(block_tokens=tokens), 16)
    assert identity.engine_blocks_of(Options(block_tokens=32), 16) == 2
    assert identity.engine_blocks_of(Options(), 16) is None
