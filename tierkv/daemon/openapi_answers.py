"""What the HTTP face answers, as JSON schemas for ``tierkv.daemon.openapi``."""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    """All of these words are always there, and no others."""
    return {
        "type": "object",
        "required": list(properties),
        "properties": properties,
        "additionalProperties": False,
    }


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _or_null(kind: str, **more: Any) -> Schema:
    return {"type": [kind, "null"], **more}


_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_NUMBER: Final[Schema] = {"type": "number", "minimum": 0}
_ANY_NUMBER: Final[Schema] = {"type": "number"}
_TEXT: Final[Schema] = {"type": "string"}
_FLAG: Final[Schema] = {"type": "boolean"}
_DIGEST: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_STATE: Final[Schema] = {"enum": ["ok", "degraded", "unhealthy"]}
_ANYTHING: Final[Schema] = {}

_REASON = _object(part=_TEXT, state=_STATE, sentence=_TEXT)
_HEALTH = _object(ready=_FLAG, state=_STATE, reasons=_list(_REASON))
_PINS = _object(
    chains=_COUNT,
    pinned_blocks=_COUNT,
    pinned_bytes=_COUNT,
    budget_bytes=_COUNT,
    blocks_by_owner=_map(_COUNT),
)
_FOUND = _object(blocks=_COUNT, tokens=_COUNT, of_blocks=_COUNT, tiers=_map(_COUNT))

_ASKED = {"asked_blocks": _COUNT, "hit_blocks": _COUNT, "ceiling": _or_null("number", minimum=0, maximum=1)}
_CALLS = _object(
    count=_COUNT,
    recent_count=_COUNT,
    p50_s=_or_null("number"),
    p95_s=_or_null("number"),
    p99_s=_or_null("number"),
)
_EDGE = _object(pending_bytes=_COUNT, bytes_per_s=_or_null("number"), calls=_CALLS, breaker_open=_FLAG)
_TIER: Final[Schema] = {
    "type": "object",
    "required": ["capacity_bytes", "used_bytes"],
    "properties": {
        "capacity_bytes": _or_null("integer"),
        "used_bytes": _COUNT,
        "clean_bytes": _COUNT,
        "populated_bytes": _COUNT,
        "blocks": _COUNT,
        "writable": _FLAG,
        "trouble": _or_null("string"),
    },
    "description": "and facts of each tier's own",
}
_LEASE = _object(owner=_TEXT, blocks=_COUNT, namespace=_DIGEST, overdue=_FLAG, ends_in_s=_or_null("number"))
_SESSION: Final[Schema] = {
    "type": "object",
    "required": ["owner", "pid", "connections", "leases", "leased_blocks", "drafts", "calls"],
    "properties": {
        "owner": _TEXT,
        "pid": _COUNT,
        "connections": _COUNT,
        "leases": _COUNT,
        "leased_blocks": _COUNT,
        "drafts": _COUNT,
        "calls": _COUNT,
    },
}
_TENANT: Final[Schema] = {
    "type": "object",
    "required": ["held_bytes", "quota_bytes", "refused_blocks"],
    "properties": {
        "held_bytes": _map(_COUNT),
        "quota_bytes": _map(_or_null("integer")),
        "refused_blocks": _COUNT,
    },
}
_NAMESPACE: Final[Schema] = {
    "type": "object",
    "required": ["digest", "blocks", "epoch", "opened"],
    "properties": {
        "digest": _DIGEST,
        "blocks": _COUNT,
        "epoch": _COUNT,
        "opened": _FLAG,
        "engine": _TEXT,
        "weights": _object(kind=_TEXT, value=_TEXT),
        "layout": _TEXT,
        "dtype": _TEXT,
        "block_tokens": _COUNT,
        "parts": _COUNT,
        "named_by": _TEXT,
        "has_salt": _FLAG,
    },
}
_HOT = _object(
    namespace=_DIGEST, hash=_DIGEST, blocks=_COUNT, tokens=_COUNT, loads=_NUMBER, tiers=_list(_TEXT)
)
_SETTING = _object(key=_TEXT, value=_ANYTHING, origin=_TEXT)
_MISSING: Final[Schema] = {
    "type": ["object", "null"],
    "required": ["position", "hash", "cause", "detail", "left"],
    "properties": {
        "position": _COUNT,
        "hash": _DIGEST,
        "cause": _TEXT,
        "detail": _or_null("string"),
        "left": _list({"type": "object"}),
    },
}
_CLEARED: Final[Schema] = {
    "type": "object",
    "required": ["removed", "complete"],
    "properties": {"removed": _COUNT, "complete": _FLAG, "detail": _TEXT, "kept": _list(_TEXT)},
}

ANSWERS: Final[Schema] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["kind", "message"],
                "properties": {"kind": _TEXT, "message": _TEXT, "key": _TEXT, "hint": _TEXT},
            }
        },
        "additionalProperties": False,
    },
    "Alive": _object(alive={"const": True}),
    "Ready": _HEALTH,
    "Found": _FOUND,
    "Pinned": _object(blocks=_COUNT, pinned=_COUNT, budget=_PINS),
    "Unpinned": _object(blocks=_COUNT, unpinned=_COUNT, budget=_PINS),
    "Cleared": _object(complete=_FLAG, tiers=_map(_CLEARED)),
    "Explained": _object(
        blocks=_COUNT,
        usable=_COUNT,
        tokens=_COUNT,
        causes=_map(_COUNT),
        first_missing=_MISSING,
        twins=_list(_object(namespace=_DIGEST, text=_TEXT)),
        notes=_list(_TEXT),
        text=_TEXT,
    ),
    "Status": _object(
        release=_TEXT,
        protocol=_COUNT,
        pid=_COUNT,
        started_at=_NUMBER,
        up_s=_NUMBER,
        health=_HEALTH,
        configuration=_list(_SETTING),
        notes=_list(_TEXT),
        tiers=_map(_TIER),
        edges=_map(_EDGE),
        blocks=_COUNT,
        counters=_map(_COUNT),
        asked=_object(**_ASKED, namespaces=_map(_object(**_ASKED))),
        asked_tokens=_object(asked=_COUNT, hit=_COUNT, ceiling=_or_null("integer", minimum=0)),
        hot=_list(_HOT),
        tenants=_object(count=_COUNT, share=_or_null("number"), tenants=_map(_TENANT)),
        pins=_PINS,
        leases=_object(count=_COUNT, leases=_list(_LEASE)),
        sessions=_object(count=_COUNT, sessions=_list(_SESSION)),
        namespaces=_object(count=_COUNT, latest=_list(_NAMESPACE)),
    ),
}
"""By name. What may be added to later says so by not forbidding other words."""
