"""Traces: one span for each verb, with numbers and no secrets; nothing at all without OpenTelemetry."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.client_support import PATIENCE_S, Live, chain_of, live, payloads_of
from tests.daemon_process import ROOT, environment, running_daemon, spec_of, tokens_of
from tests.valkey_server import eventually
from tierkv.copier import LayerPages, PagedKV
from tierkv.errors import HandleError
from tierkv.tracing import traced

trace_sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")


class Spans:
    """A tracer, and all spans that have ended."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._kept = InMemorySpanExporter()
        provider = trace_sdk.TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.tracer = provider.get_tracer("test")

    def wait_for(self, count: int) -> list[Any]:
        eventually(lambda: len(self._kept.get_finished_spans()) >= count, f"{count} spans", PATIENCE_S)
        return list(self._kept.get_finished_spans())


def offload(rig: Live, client: Any, chain: Any) -> None:
    pages = np.stack([np.frombuffer(payload, np.uint8) for [payload] in payloads_of(chain)])
    kv = PagedKV(((LayerPages((pages,)),),))
    where = [[[block]] for block in range(len(chain))]
    assert client.offload(kv, where, chain).result(PATIENCE_S).stored == len(chain)
    with client.load(chain) as lease:
        assert client.onboard(lease, kv, where).result(PATIENCE_S)


def test_each_verb_is_a_span_of_its_caller_s_trace() -> None:
    spans = Spans()
    with live(8) as rig:
        client, space = traced(rig.client, spans.tracer), rig.namespace(salt="hushed up")
        with spans.tracer.start_as_current_span("request"):
            chain = chain_of(space, 3)
            assert client.match(chain).blocks == 0
            client.put(chain, payloads_of(chain))
            assert client.prefetch(chain).result(PATIENCE_S).blocks == 3
            with client.load(chain) as lease:
                assert len(lease) == 3
            offload(rig, client, chain_of(space, 2, seed=5))
        found = spans.wait_for(8)
    names = [span.name.removeprefix("tierkv.") for span in found]
    assert sorted(names) == sorted(
        ["match", "put", "prefetch", "load", "offload", "load", "onboard", "request"]
    )
    by_name = {
        name: dict(span.attributes) for name, span in zip(reversed(names), reversed(found), strict=True)
    }
    request = next(span for span in found if span.name == "request")
    assert all(span.parent.span_id == request.context.span_id for span in found if span is not request)
    assert all(span.end_time >= span.start_time for span in found)
    digits = space.namespace.digest.hex()[:16]
    tokens = {"tierkv.namespace": digits, "tierkv.blocks": 3, "tierkv.prompt_tokens": chain.num_tokens}
    assert by_name["match"] == {
        **tokens, "tierkv.found_blocks": 0, "tierkv.found_tokens": 0, "tierkv.found_in.host": 0
    }  # fmt: skip
    assert by_name["put"] == {**tokens, "tierkv.stored_blocks": 3}
    assert by_name["load"]["tierkv.found_blocks"] == 3
    assert by_name["offload"]["tierkv.stored_blocks"] == 2
    assert by_name["onboard"]["tierkv.whole"] is True
    assert "hushed up" not in str(by_name)
    assert chain.hashes[0].hex() not in str(by_name)


def test_what_fails_is_in_the_span_and_raised_as_before() -> None:
    spans = Spans()
    with live(8) as rig:
        client, chain = traced(rig.client, spans.tracer), chain_of(rig.namespace(), 2)
        with pytest.raises(HandleError):
            client.put(chain, [b"too short", b"too"])
        (span,) = spans.wait_for(1)
        assert not span.status.is_ok
        assert [event.name for event in span.events] == ["exception"]
        with pytest.raises(TypeError):
            client.load_async(chain, nonsense=1)
        assert len(spans.wait_for(2)) == 2


def test_coroutines_leave_spans_too_and_the_rest_is_the_client_s() -> None:
    spans = Spans()
    with live(8) as rig:
        client, chain = traced(rig.client, spans.tracer), chain_of(rig.namespace(), 2)
        asyncio.run(client.aio.put(chain, payloads_of(chain)))
        assert [span.name for span in spans.wait_for(1)] == ["tierkv.put"]
        assert client.stats()["families"] == 2
        assert client.health().state == "ok"


def test_a_daemon_s_client_is_traced_alike(tmp_path: Any) -> None:
    spans = Spans()
    with running_daemon(tmp_path) as daemon, traced(daemon.client(), spans.tracer) as client:
        chain = client.open_namespace(spec_of()).chain(tokens_of(2))
        assert client.match(chain).blocks == 0
        assert [span.name for span in spans.wait_for(1)] == ["tierkv.match"]


def test_without_the_package_there_is_nothing() -> None:
    code = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from tierkv.tracing import traced\n"
        "assert traced(sys) is sys\n"
        "import tierkv; assert 'tierkv.tracing' in sys.modules\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    light = "import sys, tierkv; tierkv.open; assert not any('opentelemetry' in name for name in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", light], cwd=ROOT, env=environment(), check=False).returncode
        == 0
    )


def test_a_package_beside_the_api_is_not_the_api() -> None:
    """``opentelemetry`` is a folder that several packages share, and some stay there when the API is not."""
    code = (
        "import sys, types\n"
        "from importlib.machinery import ModuleSpec\n"
        "folder = sys.modules['opentelemetry'] = types.ModuleType('opentelemetry')\n"
        "folder.__spec__, folder.__path__ = ModuleSpec('opentelemetry', None, is_package=True), []\n"
        "from tierkv.tracing import traced\n"
        "assert traced(sys) is sys\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
