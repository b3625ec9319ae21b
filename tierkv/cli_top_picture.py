"""What ``tierkv top`` shows, as lines of text: made of one status and the one before it, which rates come from."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from tierkv.units import format_bytes, format_seconds

Answer = dict[str, Any]
MOST_ROWS: Final = 8
"""Of prefixes, sessions and leases each."""
LEAST_NAME: Final = 12
_FULL, _DIRTY, _EMPTY = "█", "▒", "·"


def picture(
    now: Answer, before: Answer | None, columns: int, word: str | None, rows: int | None = None
) -> Iterator[str]:
    """No line is wider than ``columns``. ``before`` is an earlier status of the same daemon. ``word`` is said in place
    of the keys; with an empty one neither is. Where all of it would
    take more than ``rows`` it is set closer, and has as many prefixes, sessions and leases as there is room for."""
    head = list(_head(now, Rates(now, before), columns, word))
    lists = list(_lists(now, columns))
    lines = [*head, "", *_listed(lists)]
    if rows is not None and len(lines) > rows:
        head = [line for line in head if line]
        lines = [*head, *_fitted(lists, rows - len(head))]
    for line in lines:
        yield _cut(line, columns).rstrip()


class Rates:
    """Growth a second between two statuses; nothing where there is only one."""

    def __init__(self, now: Answer, before: Answer | None) -> None:
        self._now, self._before = now, before
        self._over_s = 0.0 if before is None else now["up_s"] - before["up_s"]

    def of(self, find: Callable[[Answer], float]) -> float | None:
        if self._before is None or self._over_s <= 0:
            return None
        return max(0.0, (find(self._now) - find(self._before)) / self._over_s)

    def counter(self, name: str) -> float | None:
        return self.of(lambda status: status["counters"].get(name, 0))


def _head(now: Answer, rates: Rates, columns: int, word: str | None) -> Iterator[str]:
    health = now["health"]
    ready = "" if health["ready"] else ", not ready"
    yield f"tierkv {now['release']}  {health['state']}{ready}  process {now['pid']}, up {_time(now['up_s'])}"
    if word != "":
        yield f"! {word}" if word else "q leaves, space holds it still"
    for reason in health["reasons"]:
        yield f"! {reason['part']}: {reason['sentence']}"
    yield ""
    yield from _tiers(now, rates, columns)
    yield ""
    yield from _hits(now, rates)
    yield ""
    yield from _edges(now)


def _tiers(now: Answer, rates: Rates, columns: int) -> Iterator[str]:
    wide = max(8, columns - 66)
    yield f"{'TIER':<8}{'':<{wide + 2}}{'USED':>12}{'OF':>12}{'IN':>14}{'OUT':>14}"
    for name, its in now["tiers"].items():
        if name == "host":
            came, went = rates.counter("stored_bytes_total/host"), None
        else:
            came, went = (
                rates.counter(f"written_bytes_total/{name}"),
                rates.counter(f"read_bytes_total/{name}"),
            )
        used, room = its["used_bytes"], its["capacity_bytes"]
        yield (
            f"{name:<8}{_bar(its, wide)}  {format_bytes(used):>12}{format_bytes(room) if room else '-':>12}"
            f"{_speed(came):>14}{_speed(went):>14}"
        )
        if its.get("trouble"):
            yield f"  ! {its['trouble']}"


def _bar(its: Answer, wide: int) -> str:
    """What is clean, what is dirty (only host RAM says so), what is free."""
    capacity: int | None = its["capacity_bytes"]
    if not capacity:
        return " " * wide
    used_bytes: int = its["used_bytes"]
    clean_bytes: int = its.get("clean_bytes", used_bytes)
    used = min(wide, -(-used_bytes * wide // capacity))
    clean = min(used, -(-clean_bytes * wide // capacity))
    return _FULL * clean + _DIRTY * (used - clean) + _EMPTY * (wide - used)


def _hits(now: Answer, rates: Rates) -> Iterator[str]:
    tokens = now["asked_tokens"]
    asked, hit = tokens["asked"], tokens["hit"]
    if not asked:
        yield "TOKENS  none were asked for yet"
        return
    yield (
        f"TOKENS  asked {asked:,}, hit {hit:,} ({hit / asked:.1%}), an endless cache about "
        f"{(tokens['ceiling'] or 0) / asked:.1%}"
    )
    each = (
        f"{name} {now['counters'].get(f'hit_tokens_total/{name}', 0):,}"
        + _a_second(rates.counter(f"hit_tokens_total/{name}"))
        for name in now["tiers"]
    )
    yield f"  hit in {'; '.join(each)}"


def _edges(now: Answer) -> Iterator[str]:
    yield f"{'EDGE':<14}{'CALLS':>10}{'P50':>10}{'P95':>10}{'P99':>10}{'PENDING':>11}{'SPEED':>14}"
    for name, its in now["edges"].items():
        calls = its["calls"]
        times = "".join(f"{_time(calls[key]):>10}" for key in ("p50_s", "p95_s", "p99_s"))
        speed = "breaker open" if its["breaker_open"] else _speed(its["bytes_per_s"])
        yield f"{name:<14}{calls['count']:>10,}{times}{format_bytes(its['pending_bytes']):>11}{speed:>14}"


class _List(NamedTuple):
    heading: str
    lines: list[str]
    """The first of them."""
    known: int


def _lists(now: Answer, columns: int) -> Iterator[_List]:
    hot, sessions, leases = now["hot"], now["sessions"], now["leases"]
    heading = f"{'HOT PREFIX':<14}{'BLOCKS':>8}{'TOKENS':>9}{'LOADS':>9}  IS IN"
    yield _List(heading, [_prefix(one) for one in hot[:MOST_ROWS]], len(hot))
    for word, its, line in (("SESSIONS", sessions, _session), ("LEASES", leases, _lease)):
        shown = [line(one, columns) for one in its[word.lower()][:MOST_ROWS]]
        yield _List(f"{word}  {its['count']:,}", shown, its["count"])


def _listed(lists: Sequence[_List]) -> Iterator[str]:
    for place, one in enumerate(lists):
        if place == 1:
            yield ""
        yield one.heading
        yield from one.lines
        if one.known > len(one.lines):
            yield f"  and {one.known - len(one.lines)} more"


def _fitted(lists: Sequence[_List], room: int) -> Iterator[str]:
    """In ``room`` lines: all headings, which count what is left out, and of each list as many as of the others."""
    room, given = max(0, room - len(lists)), [0] * len(lists)
    while room and any(given[place] < len(one.lines) for place, one in enumerate(lists)):
        for place, one in enumerate(lists):
            if room and given[place] < len(one.lines):
                given[place] += 1
                room -= 1
    for one, most in zip(lists, given, strict=True):
        yield from (one.heading, *one.lines[:most])


def _prefix(one: Answer) -> str:
    where = ", ".join(one["tiers"]) or "no tier any more"
    return f"{one['hash'][:12]:<14}{one['blocks']:>8,}{one['tokens']:>9,}{one['loads']:>9.1f}  {where}"


def _session(one: Answer, columns: int) -> str:
    facts = f" (pid {one['pid']}): {one['leased_blocks']} blocks leased, {one['drafts']} drafts, {one['calls']:,} calls"
    return f"  {_name(one['owner'], columns - 2 - len(facts))}{facts}"


def _lease(one: Answer, columns: int) -> str:
    if one["ends_in_s"] is None:
        ends = "no end"
    else:
        ends = f"{'overdue by' if one['overdue'] else 'ends in'} {_time(abs(one['ends_in_s']))}"
    facts = f": {one['blocks']} blocks, {ends}"
    return f"  {_name(one['owner'], columns - 2 - len(facts))}{facts}"


def _name(owner: str, columns: int) -> str:
    """What stands behind it stays in sight."""
    plain, columns = _plain(owner), max(LEAST_NAME, columns)
    return plain if _cut(plain, columns) == plain else f"{_cut(plain, columns - 1)}…"


def _cut(line: str, columns: int) -> str:
    """As much of it as fits: letters of some scripts are two columns wide, and marks on others none."""
    wide = 0
    for place, letter in enumerate(line):
        wide += (
            0 if unicodedata.combining(letter) else 1 + (unicodedata.east_asian_width(letter) in ("W", "F"))
        )
        if wide > columns:
            return line[:place]
    return line


def _plain(owner: str) -> str:
    """What an engine calls itself cannot move the cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in owner)


def _a_second(rate: float | None) -> str:
    return "" if rate is None else f" ({rate:,.0f}/s)"


def _speed(rate: float | None) -> str:
    return "-" if rate is None else f"{format_bytes(round(rate))}/s"


def _time(value_s: float | None) -> str:
    if value_s is None:
        return "-"
    if value_s < 1e-3:
        return f"{value_s * 1e6:.0f} us"
    return f"{value_s * 1e3:.1f} ms" if value_s < 1 else format_seconds(round(value_s, 1))
