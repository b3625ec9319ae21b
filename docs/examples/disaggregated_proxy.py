"""A proxy before two vLLM servers: one computes prompts, the other answers. The KV cache goes through tierkv.

    python disaggregated_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

Both servers run with TierKVConnector (see docs/engines/vllm.md) and with one sidecar, or with two that share a Valkey
server. The decode side gets the request at the same moment and waits for the blocks of the prompt as they are stored.
If the prefill side is slow, gone or fails, the decode side computes what is missing: the answer is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

log = logging.getLogger("proxy")
COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
PREFILL_S = 120.0
"""A prompt takes no longer; the decode side has stopped waiting before."""
HOPS = frozenset({"connection", "content-length", "host", "transfer-encoding", "keep-alive"})
"""Headers that belong to one connection."""


class Proxy:
    """``prefill`` and ``decode``: the addresses of the two servers."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = prefill.rstrip("/")
        self._decode = decode.rstrip("/")
        self._under_way: set[asyncio.Task[None]] = set()
        self._session: ClientSession | None = None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=256 * 1024 * 1024)
        for path in COMPLETIONS:
            app.router.add_post(path, self.complete)
        app.router.add_route("*", "/{rest:.*}", self.forward)
        app.cleanup_ctx.append(self._open)
        return app

    async def _open(self, _: web.Application) -> Any:
        async with ClientSession(timeout=ClientTimeout(total=None)) as self._session:
            yield
            for task in self._under_way:
                task.cancel()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """The prompt to one side, the request to the other."""
        try:
            asked = await request.json()
        except json.JSONDecodeError as error:
            return web.json_response({"error": {"message": f"no JSON: {error}"}}, status=400)
        first = {**asked, "max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        for name in ("max_completion_tokens", "min_tokens", "stream_options", "n"):
            first.pop(name, None)
        task = asyncio.create_task(self._compute(request, first))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        own = asked.get("kv_transfer_params") or {}
        second = {**asked, "kv_transfer_params": {**own, "do_remote_prefill": True}}
        return await self._answer(request, json.dumps(second).encode())

    async def _compute(self, request: web.Request, body: dict[str, Any]) -> None:
        """Its answer is of no interest: what counts is what it leaves in the store."""
        assert self._session is not None
        try:
            async with self._session.post(
                self._prefill + request.path,
                json=body,
                headers=_passed_on(request),
                timeout=ClientTimeout(total=PREFILL_S),
            ) as answer:
                if answer.status != 200:
                    log.warning("prefill: %d %s", answer.status, (await answer.text())[:200])
        except (ClientError, TimeoutError) as error:
            log.warning("prefill: %r; the decode side computes the prompt", error)

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """All else (models, health, metrics) is the decode side's."""
        return await self._answer(request, await request.read())

    async def _answer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        assert self._session is not None
        try:
            async with self._session.request(
                request.method, self._decode + request.path_qs, data=body, headers=_passed_on(request)
            ) as answer:
                headers = {name: value for name, value in answer.headers.items() if name.lower() not in HOPS}
                headers.pop("Content-Encoding", None)  # it is read decoded
                response = web.StreamResponse(status=answer.status, headers=headers)
                await response.prepare(request)
                async for piece in answer.content.iter_any():  # a streamed answer goes on as it comes
                    await response.write(piece)
                await response.write_eof()
                return response
        except ClientError as error:
            return web.json_response({"error": {"message": f"decode: {error!r}"}}, status=502)


def _passed_on(request: web.Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.lower() not in HOPS}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    web.run_app(Proxy(options.prefill, options.decode).app(), host=options.host, port=options.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
