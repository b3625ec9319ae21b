"""The page for operators, in a real browser, at a real daemon under real traffic."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import tierkv
from tests.browser import Watched, axe_script, running_browser
from tests.daemon_process import PATIENCE_S, Daemon, payloads_of, spec_of, tokens_of
from tests.page_support import TOKEN, Traffic, watched_daemon
from tierkv.metrics import METRICS

PATIENCE_MS = PATIENCE_S * 1000
FILES = Path(tierkv.__file__).parent / "daemon" / "page"
SERVERS_OWN = "tier_used_bytes/valkey"
"""What the server says of its memory: its own upkeep changes it at any time."""
LABELS = {metric.name: metric.labels for metric in METRICS}
SHOWN = "#numbers:not([hidden])"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with watched_daemon(tmp_path_factory.mktemp("page")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_browser() as browser:
        yield browser


def address(daemon: Daemon) -> str:
    connection = daemon.connect_http()
    return f"http://{connection.host}:{connection.port}/"


@contextmanager
def opened(browser: Any, daemon: Daemon, *, token: str | None = TOKEN, **context: Any) -> Iterator[Watched]:
    """The page, and behind its question for the token where one is given."""
    its = browser.new_context(**context)
    its.set_default_timeout(PATIENCE_MS)
    watched = Watched(its.new_page())
    try:
        watched.page.goto(address(daemon))
        if token is not None:
            watched.page.keyboard.type(token)  # the field has the focus
            watched.page.keyboard.press("Enter")
            watched.page.wait_for_selector(SHOWN)
        yield watched
    finally:
        its.close()


def series(path: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """``hit_blocks_total/host`` as Prometheus calls it."""
    name, *values = path.split("/")
    return f"tierkv_{name}", tuple(sorted(zip(LABELS[name], values, strict=True)))


def shown(page: Any, attribute: str) -> dict[str, float]:
    """Numbers on the page, by what they say they are."""
    found = page.eval_on_selector_all(
        f"[{attribute}]", f"all => all.map(one => [one.getAttribute('{attribute}'), one.textContent])"
    )
    return {name: float(text.replace(",", "")) for name, text in found}


def wait_for_next_look(page: Any, daemon: Daemon) -> None:
    """Until the page shows something that was asked for after now."""
    up_s = daemon.ask("/v1/status")[1]["up_s"]
    page.wait_for_function("up => Number(document.getElementById('when').dataset.upS) > up", arg=up_s)


# ---- without a browser


def test_the_files_need_no_token_and_carry_no_data(daemon: Daemon) -> None:
    stranger = Daemon(**{**vars(daemon), "token": None})
    for path in ["/", *(f"/page/{one.name}" for one in FILES.iterdir() if one.name != "index.html")]:
        status, kind, body = stranger.ask_raw(path)
        assert (status, len(body) > 100) == (200, True), path
        assert kind != "application/octet-stream"
    assert stranger.ask("/page/nothing.js")[0] == 401
    assert stranger.ask("/page/../http.py")[0] == 401
    assert daemon.ask("/page/nothing.js")[0] == 404
    assert stranger.ask("/", method="POST")[0] == 405


def test_the_browser_is_told_to_ask_nobody_else(daemon: Daemon) -> None:
    connection = daemon.connect_http()
    connection.request("GET", "/")
    policy = connection.getresponse().headers["Content-Security-Policy"]
    connection.close()
    sources = dict(part.split(" ", 1) for part in policy.split("; "))
    assert sources.pop("default-src") == "'none'"
    assert set(sources.values()) == {"'self'", "'none'"}
    for one in FILES.iterdir():
        elsewhere = set(re.findall(r"\w+://[^\s\"'`)]+", one.read_text())) - {"http://www.w3.org/2000/svg"}
        assert not elsewhere, one.name
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", all_scripts())


def all_scripts() -> str:
    return "".join(one.read_text() for one in FILES.glob("*.js"))


# ---- numbers


def test_d28_numbers_move_and_equal_the_metrics(browser: Any, daemon: Daemon) -> None:
    with opened(browser, daemon) as watched:
        page = watched.page
        with Traffic(daemon) as traffic:
            page.wait_for_selector("[data-counter='hit_tokens_total/host']")
            before = shown(page, "data-counter")
            page.wait_for_function(
                "before => Number(document.querySelector('#tiers [data-counter=\"hit_tokens_total/host\"]')"
                ".textContent.replaceAll(',', '')) > before",
                arg=before["hit_tokens_total/host"],
            )
            page.wait_for_selector("#events td:has-text('arrived')")
            page.wait_for_selector("#sessions th:has-text('engine')")
            page.wait_for_selector("#chart path.area.host")
            traffic.stop()
        metrics, counters, gauges = at_rest(page, daemon)
        assert {"arrived_blocks_total/nvme", "hit_tokens_total/host", "written_bytes_total/valkey"} <= set(
            counters
        )
        for name, value in counters.items():
            if "scrub" not in name:  # it works while all others rest
                assert value == metrics.get(series(name), 0), name
        expected = {series(name) for name in counters}
        for (name, labels), value in metrics.items():
            if name.removeprefix("tierkv_") in LABELS and value and "scrub" not in name:
                assert (name, labels) in expected, "a counter that is not on the page"
        assert set(gauges) >= {"tier_used_bytes/host", "edge_call_seconds_count/host>nvme"}
        for path, value in gauges.items():
            name, label = path.split("/")
            key = "edge" if name.startswith("edge") else "tier"
            assert value == metrics[f"tierkv_{name}", ((key, label),)], path
        assert not watched.complaints
        assert watched.hosts == {urlsplit(address(daemon)).netloc}


def at_rest(page: Any, daemon: Daemon) -> tuple[dict[Any, float], dict[str, float], dict[str, float]]:
    """The metrics, and the counters and gauges on the page, of one time in which nothing changed."""
    over_s = time.monotonic() + PATIENCE_S
    after = numbers_of(daemon)
    while True:
        before = after
        wait_for_next_look(page, daemon)
        counters, gauges = shown(page, "data-counter"), shown(page, "data-gauge")
        assert gauges.pop(SERVERS_OWN) > 0
        after = numbers_of(daemon)
        if before == after:
            return after, counters, gauges
        moved = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        assert time.monotonic() < over_s, f"the daemon does not come to rest: {moved}"


def numbers_of(daemon: Daemon) -> dict[Any, float]:
    """What stands still while nobody does anything."""
    moving = ("process_", "tierkv_scrub", "tierkv_http")
    numbers = daemon.metrics()
    del numbers["tierkv_tier_used_bytes", (("tier", "valkey"),)]
    return {key: value for key, value in numbers.items() if not key[0].startswith(moving)}


def test_what_an_engine_calls_itself_is_only_text(browser: Any, daemon: Daemon) -> None:
    name = "<img src=x onerror=\"document.title='taken'\">"
    with tierkv.connect(f"unix://{daemon.socket}", owner=name) as client:
        chain = client.open_namespace(spec_of(name)).chain(tokens_of(2))
        client.put(chain, payloads_of(2))
        with opened(browser, daemon) as watched, client.load(chain):
            row = watched.page.wait_for_selector(f"#leases th:has-text({name!r})")
            assert row.text_content().startswith(name)
            assert watched.page.query_selector("main img") is None
            assert watched.page.title() == "tierkv"


# ---- hands and eyes


def test_the_token_is_asked_for_and_stays_in_the_tab(browser: Any, daemon: Daemon) -> None:
    with opened(browser, daemon, token=None) as watched:
        page = watched.page
        assert page.is_visible("#token-form")
        assert not page.is_visible("#numbers")
        assert not watched.complaints, "nothing was asked for that must be refused"
        page.keyboard.type("not the token at all")
        page.keyboard.press("Enter")
        page.wait_for_selector("#token-why:has-text('not the daemon')")
        assert page.evaluate("sessionStorage.length + localStorage.length") == 0
        page.keyboard.type(TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_selector(SHOWN)
        assert TOKEN not in page.content()
        assert TOKEN not in page.url
        page.reload()
        page.wait_for_selector(SHOWN)
        assert page.evaluate("Object.values(localStorage)") == []
    with opened(browser, daemon, token=None) as watched:
        assert watched.page.is_visible("#token-form"), "another window has it too"


def test_all_can_be_reached_with_the_keyboard(browser: Any, daemon: Daemon) -> None:
    with opened(browser, daemon) as watched:
        page = watched.page
        reachable = page.evaluate(
            "() => [...document.querySelectorAll('a, button, input, [tabindex]')].filter("
            "one => one.checkVisibility()).map(one => one.id || one.ariaLabel || one.value || one.className)"
        )
        assert {
            "pause",
            "theme",
            "counter-filter",
            "setting-filter",
            "Table of edges",
            "stored",
            "skip",
        } <= set(reachable)
        page.evaluate("document.activeElement.blur(); document.body.tabIndex = -1; document.body.focus()")
        reached = []
        for _ in reachable:
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate(
                    "(() => { const one = document.activeElement;"
                    " return one.id || one.ariaLabel || one.value || one.className; })()"
                )
            )
        assert sorted(reached) == sorted(reachable)
        page.focus("#pause")
        page.keyboard.press("Space")
        assert page.get_attribute("#pause", "aria-pressed") == "true"
        at = page.text_content("#when")
        page.keyboard.press("Space")
        page.wait_for_function("at => document.getElementById('when').textContent !== at", arg=at)
        page.focus("#counter-filter")
        page.keyboard.type("hit_tokens")
        assert all("hit_tokens" in name for name in page.locator("#counters tbody th").all_text_contents())


@pytest.mark.parametrize("width", [375, 768, 1280])
def test_nothing_is_wider_than_the_screen(browser: Any, daemon: Daemon, width: int) -> None:
    with opened(browser, daemon, viewport={"width": width, "height": 800}) as watched:
        page = watched.page
        page.wait_for_selector("#chart svg")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        smallest = page.evaluate(
            "() => Math.min(...[...document.querySelectorAll('main *')].filter(one => one.checkVisibility() &&"
            " one.textContent.trim()).map(one => parseFloat(getComputedStyle(one).fontSize) *"
            " (one.closest('svg') ? one.closest('svg').clientWidth / one.closest('svg').viewBox.baseVal.width : 1)))"
        )
        assert smallest >= 11.5


def test_axe_finds_no_fault(browser: Any, daemon: Daemon) -> None:
    with opened(browser, daemon, color_scheme="light") as watched:
        page = watched.page
        page.wait_for_selector("#chart svg")
        page.click("#pause")
        for filter_id in ("counter-filter", "setting-filter"):  # a few rows are like all
            page.fill(f"#{filter_id}", "host")
        page.evaluate(axe_script())
        for scheme in ("light", "dark"):
            assert page.get_attribute("html", "data-theme") == scheme
            found = page.evaluate("axe.run().then(told => told.violations)")
            told = [(one["id"], one["impact"], [node["target"] for node in one["nodes"]]) for one in found]
            assert not told
            page.click("#theme")


def test_the_page_says_when_the_daemon_is_gone(browser: Any, tmp_path: Path) -> None:
    with watched_daemon(tmp_path) as daemon, opened(browser, daemon) as watched:
        assert watched.page.text_content("#health") in ("ok", "degraded")
        assert daemon.stop() == 0, "an open event stream holds nothing up"
        watched.page.wait_for_selector("#health:has-text('does not answer')")
