"""The HTTP face described for machines (OpenAPI 3.1): served at ``/v1/openapi.json``, kept as ``docs/openapi.json``.

Written down once, here; tests compare it with the routes, with the questions, and, by a fuzzer, with what is answered.
``python -m tierkv.daemon.openapi`` prints it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tierkv import __version__
from tierkv.daemon.openapi_answers import ANSWERS
from tierkv.daemon.questions import LEAST_DIGITS, MOST_BLOCKS, MOST_TOKENS, MOST_WAIT_S

Schema = dict[str, Any]

_TOKEN_IDS: Final[Schema] = {
    "type": "array",
    "items": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    "maxItems": MOST_TOKENS,
    "description": "token ids of the whole prompt",
}
_HASHES: Final[Schema] = {
    "type": "array",
    "items": {"type": "string", "pattern": "^[0-9a-fA-F]{64}$"},
    "maxItems": MOST_BLOCKS,
    "description": "hashes of the prompt's blocks in hex; base64 is taken too",
}
_NAMESPACE: Final[Schema] = {
    "type": "string",
    "pattern": f"^[0-9a-fA-F]{{{LEAST_DIGITS},64}}$",
    "description": "digest of a namespace in hex, or the beginning of it; /v1/status lists them",
}
_ADAPTER: Final[Schema] = {
    "type": ["object", "null"],
    "required": ["name", "revision"],
    "properties": {"name": {"type": "string"}, "revision": {"type": "string"}},
}
_TIMEOUT: Final[Schema] = {
    "type": ["number", "null"],
    "minimum": 0,
    "maximum": MOST_WAIT_S,
    "description": "seconds after which the answer comes with what is there by then",
}
_TTL: Final[Schema] = {
    "type": ["number", "null"],
    "exclusiveMinimum": 0,
    "maximum": 1e9,
    "description": "seconds until the pin ends",
}

_ERRORS: Final[Mapping[int, str]] = {
    400: "the question is wrong; the message says where",
    401: "no token, or a wrong one",
    403: "a page of another host asks, in a browser",
    404: "no such namespace",
    408: "the body did not come within 10 s",
    413: "the body is too long",
    500: "it failed",
    503: "closed, or too busy; see Retry-After",
    504: "it took too long",
}


def _prompt(**more: Schema) -> Schema:
    """The body of a question about a prompt, said either way."""
    both = {"namespace": _NAMESPACE, **more}
    by_tokens = {
        **both,
        "tokens": _TOKEN_IDS,
        "adapter": _ADAPTER,
        "cache_salt": {"type": ["string", "null"]},
    }
    by_hashes = {**both, "hashes": _HASHES, "adapter": {"type": "null"}, "cache_salt": {"type": "null"}}
    return {
        "oneOf": [
            {
                "title": f"by its {name}",
                "type": "object",
                "required": ["namespace", name],
                "properties": properties,
                "additionalProperties": False,
            }
            for name, properties in (("tokens", by_tokens), ("hashes", by_hashes))
        ]
    }


def _clear() -> Schema:
    words: Mapping[str, Schema] = {
        "namespace": _NAMESPACE,
        "tenant_salt": {"type": "string"},
        "everything": {"const": True},
    }
    unset = {"namespace": {"type": "null"}, "tenant_salt": {"type": "null"}, "everything": {"const": False}}
    return {
        "oneOf": [
            {
                "title": name,
                "type": "object",
                "required": [name],
                "properties": {**unset, name: schema, "timeout_s": _TIMEOUT},
                "additionalProperties": False,
            }
            for name, schema in words.items()
        ]
    }


def _answer(name: str, description: str) -> Schema:
    return {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
    }


def _get(summary: str, answers: Mapping[int, Schema], **more: Any) -> Schema:
    return {"get": {"summary": summary, "responses": _responses(answers), **more}}


def _post(name: str, summary: str, body: Schema, answer: str, errors: tuple[int, ...]) -> Schema:
    wrong = {
        status: _answer("Error", _ERRORS[status]) for status in (400, 401, 403, *errors, 408, 413, 500, 503)
    }
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": _responses({200: _answer(answer, "the answer"), **wrong}),
        }
    }


def _responses(answers: Mapping[int, Schema]) -> Schema:
    return {str(status): answer for status, answer in sorted(answers.items())}


def _number(name: str, where: str, description: str) -> Schema:
    schema = {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}
    return {"name": name, "in": where, "description": description, "schema": schema}


def _text(description: str, content_type: str) -> Schema:
    return {"description": description, "content": {content_type: {"schema": {"type": "string"}}}}


def _paths() -> Schema:
    refused = {status: _answer("Error", _ERRORS[status]) for status in (401, 503)}
    failed = {**refused, 500: _answer("Error", _ERRORS[500])}
    wait = {"timeout_s": _TIMEOUT}
    return {
        "/": _get("a page for a browser", {200: _text("the page", "text/html")}, operationId="page", security=[]),
        "/healthz": _get(
            "does the process live", {200: _answer("Alive", "it does")}, operationId="healthz", security=[]
        ),
        "/readyz": _get(
            "is it worth sending requests to",
            {**failed, 200: _answer("Ready", "it is"), 503: {
                "description": "it is not; or too busy to tell",
                "content": {"application/json": {"schema": {"anyOf": [
                    {"$ref": "#/components/schemas/Ready"}, {"$ref": "#/components/schemas/Error"}]}}},
            }},
            operationId="readyz",
        ),
        "/metrics": _get(
            "numbers for Prometheus", {**failed, 200: _text("in its text format", "text/plain")}, operationId="metrics"
        ),
        "/v1/openapi.json": _get(
            "this description", {**refused, 200: {
                "description": "OpenAPI 3.1", "content": {"application/json": {"schema": {"type": "object"}}}
            }},
            operationId="openapi",
        ),
        "/v1/status": _get(
            "health, settings, tiers, edges, counters, leases, sessions, namespaces",
            {**failed, 200: _answer("Status", "the answer"), **{
                status: _answer("Error", _ERRORS[status]) for status in (400, 408, 413)
            }},
            operationId="status",
        ),
        "/v1/events": _get(
            "what comes and goes, as server-sent events, without an end",
            {**refused, 200: _text("messages `blocks` and `gap`", "text/event-stream"),
             400: _answer("Error", _ERRORS[400])},
            operationId="events",
            parameters=[
                _number("after", "query", "the number of the last event that is known"),
                _number("most", "query", "so many events at once; older ones are left out and counted"),
                _number("Last-Event-ID", "header", "as `after`, and goes before it; browsers send it"),
            ],
        ),
        "/v1/match": _post(
            "match", "how many leading blocks are there, and where; counts as no request", _prompt(), "Found", (404,)
        ),
        "/v1/explain": _post("explain", "why blocks are a miss", _prompt(), "Explained", (404,)),
        "/v1/prefetch": _post(
            "prefetch", "loads into host RAM, holds nothing", _prompt(**wait), "Found", (404, 504)
        ),
        "/v1/pin": _post(
            "pin", "keeps blocks in host RAM, within host.pin_budget", _prompt(**wait, ttl_s=_TTL), "Pinned", (404, 504)
        ),
        "/v1/unpin": _post("unpin", "lets them go", _prompt(), "Unpinned", (404,)),
        "/v1/clear": _post("clear", "forgets in every tier", _clear(), "Cleared", (404, 504)),
    }  # fmt: skip


def description() -> Schema:
    """The whole document, as plain values."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tierkv",
            "version": __version__,
            "summary": "A tiered store for the KV cache of LLM inference engines: what people may ask a daemon.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"token": []}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "on TCP; on a unix socket its mode says who may ask",
                }
            },
            "schemas": ANSWERS,
        },
    }


if __name__ == "__main__":
    print(json.dumps(description(), indent=1))
