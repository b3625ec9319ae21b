"""The example proxy for prefill and decode, with two servers that answer as vLLM would."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

PATH = Path(__file__).parent.parent / "docs/examples/disaggregated_proxy.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("disaggregated_proxy", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Side:
    """Remembers what it was asked."""

    def __init__(self, status: int = 200) -> None:
        self.asked: list[dict[str, Any]] = []
        self._status = status

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"path": request.path_qs})
        asked = await request.json()
        self.asked.append(asked)
        if not asked.get("stream"):
            return web.json_response({"said": len(asked["prompt"])}, status=self._status)
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b"data: one\n\n", b"data: two\n\n"):
            await response.write(piece)
        return response

    def server(self) -> TestServer:
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", self.answer)
        return TestServer(app)


def through_proxy(prefill: Side, decode: Side, use: Callable[[ClientSession, str], Awaitable[None]]) -> None:
    async def run() -> None:
        async with prefill.server() as first, decode.server() as second:
            proxy = example().Proxy(str(first.make_url("")), str(second.make_url("")))
            async with TestServer(proxy.app()) as server, ClientSession() as session:
                await use(session, str(server.make_url("")).rstrip("/"))

    asyncio.run(run())


def test_a_prompt_goes_to_both_sides_with_what_each_is_to_do() -> None:
    prefill, decode = Side(), Side()

    async def use(session: ClientSession, url: str) -> None:
        body = {
            "prompt": "four",
            "max_tokens": 9,
            "min_tokens": 3,
            "kv_transfer_params": {"tierkv": {"priority": 1}},
        }
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            assert await answer.json() == {"said": 4}
        async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as answer:
            assert await answer.text() == "data: one\n\ndata: two\n\n"
        async with session.get(f"{url}/v1/models?x=1") as answer:
            assert await answer.json() == {"path": "/v1/models?x=1"}
        while len(prefill.asked) < 2:
            await asyncio.sleep(0.01)

    through_proxy(prefill, decode, use)
    for asked in prefill.asked:
        assert (asked["max_tokens"], asked["stream"]) == (1, False)
        assert asked["kv_transfer_params"] == {"do_remote_decode": True}
        assert "min_tokens" not in asked
    assert decode.asked[0]["kv_transfer_params"] == {"tierkv": {"priority": 1}, "do_remote_prefill": True}
    assert decode.asked[0]["max_tokens"] == 9


def test_the_answer_comes_also_when_the_prefill_side_fails() -> None:
    decode = Side()

    async def use(session: ClientSession, url: str) -> None:
        async with session.post(f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 2}) as answer:
            assert await answer.json() == {"said": 3}
        async with session.post(f"{url}/v1/completions", data=b"{") as answer:
            assert answer.status == 400
            assert "no JSON" in json.dumps(await answer.json())

    through_proxy(Side(status=500), decode, use)
