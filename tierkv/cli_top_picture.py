"""What ``tierkv top`` shows, as lines of text: made of one status and the one before it, which rates come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from tierkv.units import format_bytes, format_seconds

Answer = dict[str, Any]
LEAST_COLUMNS: Final = 40
MOST_ROWS: Final = 8
"""Of prefixes, sessions and leases each."""
_FULL, _DIRTY, _EMPTY = "█", "▒", "·"


def picture(now: Answer, before: Answer | None, columns: int, word: str | None) -> Iterator[str]:
    """No line is longer than ``columns``. ``before`` is an earlier status of the same daemon."""
    columns = max(LEAST_COLUMNS, columns)
    rates = Rates(now, before)
    for line in _lines(now, rates, columns, word):
        yield line[:columns].rstrip()


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


def _lines(now: Answer, rates: Rates, columns: int, word: str | None) -> Iterator[str]:
    health = now["health"]
    ready = "" if health["ready"] else ", not ready"
    yield f"tierkv {now['release']}  {health['state']}{ready}  process {now['pid']}, up {_time(now['up_s'])}"
    yield f"! {word}" if word else "q leaves, space holds it still"
    for reason in health["reasons"]:
        yield f"! {reason['part']}: {reason['sentence']}"
    yield ""
    yield from _tiers(now, rates, columns)
    yield ""
    yield from _hits(now, rates)
    yield ""
    yield from _edges(now)
    yield ""
    yield from _rest(now)


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
        ill = "  breaker open" if its["breaker_open"] else ""
        yield (
            f"{name:<14}{calls['count']:>10,}{times}{format_bytes(its['pending_bytes']):>11}"
            f"{_speed(its['bytes_per_s']):>14}{ill}"
        )


def _rest(now: Answer) -> Iterator[str]:
    yield f"{'HOT PREFIX':<14}{'BLOCKS':>8}{'TOKENS':>9}{'LOADS':>9}  IS IN"
    yield from _listed(now["hot"], len(now["hot"]), _prefix)
    yield ""
    yield f"{now['sessions']['count']} SESSIONS"
    yield from _listed(now["sessions"]["sessions"], now["sessions"]["count"], _session)
    yield f"{now['leases']['count']} LEASES"
    yield from _listed(now["leases"]["leases"], now["leases"]["count"], _lease)


def _listed(found: Sequence[Answer], count: int, line: Callable[[Answer], str]) -> Iterator[str]:
    yield from map(line, found[:MOST_ROWS])
    if count > MOST_ROWS:
        yield f"  and {count - MOST_ROWS} more"


def _prefix(one: Answer) -> str:
    where = ", ".join(one["tiers"]) or "no tier any more"
    return f"{one['hash'][:12]:<14}{one['blocks']:>8,}{one['tokens']:>9,}{one['loads']:>9.1f}  {where}"


def _session(one: Answer) -> str:
    return (
        f"  {_plain(one['owner'])} (pid {one['pid']}): {one['leased_blocks']} blocks leased, {one['drafts']} drafts, "
        f"{one['calls']:,} calls"
    )


def _lease(one: Answer) -> str:
    if one["ends_in_s"] is None:
        ends = "no end"
    else:
        ends = f"{'overdue by' if one['overdue'] else 'ends in'} {_time(abs(one['ends_in_s']))}"
    return f"  {_plain(one['owner'])}: {one['blocks']} blocks, {ends}"


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
