"""``tierkv status``: how a daemon is, what it holds and for whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tierkv.cli_ask import parser_of, run
from tierkv.units import format_bytes, format_seconds

Answer = dict[str, Any]
MOST_LINES = 20
"""Of each kind; ``--json`` has all."""


def main(argv: Sequence[str]) -> int:
    parser = parser_of("status", "How a daemon is. The status is 1 when it is unhealthy.")
    parser.add_argument("--settings", action="store_true", help="the settings in force too")
    arguments = parser.parse_args(argv)
    return run(
        "status",
        arguments,
        dict,
        lambda answer: _show(answer, settings=arguments.settings),
        fine=lambda answer: answer["health"]["state"] != "unhealthy",
    )


def _show(answer: Answer, *, settings: bool) -> Iterator[str]:
    health = answer["health"]
    ready = "ready" if health["ready"] else "not ready"
    yield (
        f"tierkv {answer['release']}, process {answer['pid']}, up {format_seconds(answer['up_s'])}: "
        f"{health['state']}, {ready}"
    )
    yield from (f"  {reason['part']}: {reason['sentence']}" for reason in health["reasons"])
    yield "tiers"
    yield from (f"  {line}" for line in _tiers(answer["tiers"]))
    if answer["edges"]:
        yield "edges"
    for name, edge in answer["edges"].items():
        speed = f", {format_bytes(int(edge['bytes_per_s']))}/s" if edge["bytes_per_s"] else ""
        yield f"  {name}: {format_bytes(edge['pending_bytes'])} pending{speed}"
    yield f"blocks: {answer['blocks']}"
    asked = answer["asked"]
    if asked.get("asked_blocks"):
        yield f"asked for: {asked['asked_blocks']} blocks, {asked['hit_blocks']} were there"
    pins = answer["pins"]
    yield (
        f"pinned: {pins['pinned_blocks']} blocks, {format_bytes(pins['pinned_bytes'])} of "
        f"{format_bytes(pins['budget_bytes'])}"
    )
    tenants = answer["tenants"]
    yield from _listed("tenants", tenants["count"], map(_tenant, tenants["tenants"].items()))
    yield from _listed("leases", answer["leases"]["count"], map(_lease, answer["leases"]["leases"]))
    yield from _listed("sessions", answer["sessions"]["count"], map(_session, answer["sessions"]["sessions"]))
    yield from _listed(
        "namespaces", answer["namespaces"]["count"], map(_namespace, answer["namespaces"]["latest"])
    )
    if settings:
        yield "settings"
        for one in answer["configuration"]:
            yield f"  {one['key']} = {'unset' if one['value'] is None else one['value']} ({one['origin']})"
    yield from (f"note: {note}" for note in answer["notes"])


def _tiers(tiers: Answer) -> Iterator[str]:
    for name, its in tiers.items():
        capacity = its.get("capacity_bytes")
        room = f"{format_bytes(its['used_bytes'])} of {format_bytes(capacity)}" if capacity else (
            format_bytes(its["used_bytes"])
        )  # fmt: skip
        trouble = its.get("trouble")
        yield f"{name}: {room} used" + (f"; {trouble}" if trouble else "")


def _tenant(named: tuple[str, Answer]) -> str:
    name, its = named
    quotas = its["quota_bytes"]
    tiers = (
        f"{tier} {format_bytes(size)}"
        + (f" of {format_bytes(quotas[tier])}" if quotas[tier] is not None else "")
        for tier, size in its["held_bytes"].items()
    )
    refused = f"; {its['refused_blocks']} blocks refused" if its["refused_blocks"] else ""
    return f"{name}: {', '.join(tiers)}{refused}"


def _listed(what: str, count: int, lines: Iterator[str]) -> Iterator[str]:
    yield f"{what}: {count}"
    for shown, line in enumerate(lines):
        if shown == MOST_LINES:
            yield f"  and {count - shown} more"
            return
        yield f"  {line}"


def _lease(one: Answer) -> str:
    if one["ends_in_s"] is None:
        return f"{one['blocks']} blocks, {one['owner']}, no end"
    late = "overdue by" if one["overdue"] else "ends in"
    return f"{one['blocks']} blocks, {one['owner']}, {late} {format_seconds(abs(one['ends_in_s']))}"


def _session(one: Answer) -> str:
    return (
        f"{one['owner']} (pid {one['pid']}): {one['connections']} connections, {one['leases']} leases of "
        f"{one['leased_blocks']} blocks, {one['drafts']} drafts, {one['calls']} calls"
    )


def _namespace(one: Answer) -> str:
    if not one["opened"]:
        return f"{one['digest']}: {one['blocks']} blocks, not opened since the start"
    salt = ", with a salt" if one["has_salt"] else ""
    return (
        f"{one['digest']}: {one['blocks']} blocks of {one['block_tokens']} tokens, {one['engine']}, {one['layout']}, "
        f"{one['dtype']}, weights {one['weights']['value'][:24]}{salt}"
    )
