"""The page where things are not as usual: a daemon that hangs, one that was started anew, long names, many of them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tests.browser import running_browser
from tests.daemon_process import PATIENCE_S, Daemon, payloads_of, running_daemon, spec_of, tokens_of
from tests.page_support import TOKEN
from tests.test_page import opened
from tests.valkey_server import eventually, running_server

WELL = "#health.ok, #health.degraded"
ENGINES, SHOWN = 23, 20
RIGHT = "all => Math.max(...all.map(one => one.getBoundingClientRect().right))"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("page"), token=TOKEN, sidecar_http="127.0.0.1:0") as daemon:
        yield daemon


def test_a_daemon_that_hangs_is_no_healthy_one(browser: Any, daemon: Daemon) -> None:
    with opened(browser, daemon) as watched:
        watched.page.wait_for_selector(WELL)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            watched.page.wait_for_selector("#health:has-text('does not answer')")
            assert "no answer in 10 s" in watched.page.text_content("#when")
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        watched.page.wait_for_selector(WELL)


def test_the_configuration_is_that_of_the_daemon_that_answers(browser: Any, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    capacity = "#settings tr:has-text('host.capacity') td"
    with ExitStack() as page:
        with running_daemon(tmp_path, token=TOKEN, sidecar_http=place, host_capacity="32 MiB") as daemon:
            watched = page.enter_context(opened(browser, daemon))
            watched.page.wait_for_selector(f"{capacity}:has-text('32 MiB')")
        watched.page.wait_for_selector("#health:has-text('does not answer')")
        with running_daemon(tmp_path, token=TOKEN, sidecar_http=place, host_capacity="48 MiB"):
            watched.page.wait_for_selector(f"{capacity}:has-text('48 MiB')")


def test_long_names_push_no_number_out_of_sight_and_who_is_not_shown_is_counted(
    browser: Any, daemon: Daemon
) -> None:
    with ExitStack() as crowd:
        for number in range(ENGINES):
            owner = f"{number}-" + "a-very-long-name-of-an-engine" * 6
            client = crowd.enter_context(tierkv.connect(f"unix://{daemon.socket}", owner=owner))
            chain = client.open_namespace(spec_of()).chain(tokens_of(2))
            client.put(chain, payloads_of(2))
            crowd.enter_context(client.load(chain))
        with opened(browser, daemon, viewport={"width": 1280, "height": 800}) as watched:
            for table in ("sessions", "leases"):
                watched.page.wait_for_selector(f"#{table} td:has-text('and {ENGINES - SHOWN} more')")
                frame = watched.page.locator(f"section:has(> .scroll > #{table})").bounding_box()
                right = watched.page.eval_on_selector_all(f"#{table} td", RIGHT)
                assert right <= frame["x"] + frame["width"], table


def test_on_a_telephone_a_counter_stands_beside_its_name(browser: Any, daemon: Daemon) -> None:
    with tierkv.connect(f"unix://{daemon.socket}", owner="engine") as client:
        chain = client.open_namespace(spec_of("telephone")).chain(tokens_of(3))
        client.put(chain, payloads_of(3))
    with opened(browser, daemon, viewport={"width": 375, "height": 800}) as watched:
        watched.page.wait_for_selector("#counters [data-counter='stored_bytes_total/host']")
        right = watched.page.evaluate(
            "() => { const row = document.querySelector('#counters tbody tr');"
            " row.firstChild.textContent = 'recovered_unreachable_total/nvme/of_a_layout_that_is_gone';"
            " return row.lastChild.getBoundingClientRect().right; }"
        )
        assert right <= 375


@pytest.mark.parametrize("width", [375, 1280])
def test_a_server_that_is_gone_is_said_in_its_box(browser: Any, tmp_path: Path, width: int) -> None:
    settings = {"nvme_path": str(tmp_path / "disk"), "nvme_capacity": "64 MiB", "nvme_min_free": 0}
    with (
        running_server() as server,
        running_daemon(
            tmp_path, token=TOKEN, sidecar_http="127.0.0.1:0", valkey_url=server.address, **settings
        ) as daemon,
        opened(browser, daemon, viewport={"width": width, "height": 800}) as watched,
    ):
        server.kill()
        watched.page.wait_for_selector("#picture text.trouble:has-text('does not answer')")
        watched.page.click("#pause")
        words = watched.page.eval_on_selector_all(
            "#picture text",
            "all => all.map(one => one.getBoundingClientRect()).map(one => [one.left, one.top, one.right, one.bottom])",
        )
        for place, one in enumerate(words):
            for other in words[:place]:
                apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
                assert apart, "words on words"


def listeners(daemon: Daemon) -> float:
    """How many requests are being answered beside this one: those that have no end."""
    return daemon.metrics()["tierkv_http_requests_under_way", ()] - 1


def test_a_page_out_of_sight_takes_no_place_from_those_who_listen(browser: Any, daemon: Daemon) -> None:
    hide = (
        "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }"
    )
    eventually(lambda: listeners(daemon) == 0, "the pages of other tests have left", PATIENCE_S)
    with opened(browser, daemon) as watched:
        eventually(lambda: listeners(daemon) == 1, "it listens", PATIENCE_S)
        watched.page.evaluate(hide, True)
        eventually(lambda: listeners(daemon) == 0, "it does not listen any more", PATIENCE_S)
        watched.page.evaluate(hide, False)
        eventually(lambda: listeners(daemon) == 1, "it listens again", PATIENCE_S)


def test_a_page_that_gets_no_events_says_so(browser: Any, daemon: Daemon) -> None:
    # A page of another test that ends now would leave its place to this one.
    eventually(lambda: listeners(daemon) == 0, "nobody listens any more", PATIENCE_S)
    with ExitStack() as crowd:

        def listen() -> bool:
            connection = crowd.enter_context(closing(daemon.connect_http()))
            connection.request("GET", "/v1/events", headers={"Authorization": f"Bearer {TOKEN}"})
            return connection.getresponse().status == 503

        eventually(listen, "all places are taken", PATIENCE_S)
        with opened(browser, daemon) as watched:
            watched.page.wait_for_selector("#missed:has-text('no events come (503')")
            crowd.close()
            watched.page.wait_for_selector("#missed:not(:has-text('no events come'))")


def test_what_can_be_no_token_is_said_to_be_none(browser: Any, daemon: Daemon) -> None:
    """Put into a header, it was an error of the browser's, and the daemon was said not to answer."""
    with opened(browser, daemon, token=None) as watched:
        watched.page.keyboard.insert_text("\N{EURO SIGN}" + TOKEN)
        watched.page.keyboard.press("Enter")
        watched.page.wait_for_selector("#token-why:has-text('not the daemon')")
        assert watched.page.text_content("#health") == "token needed"
        watched.page.keyboard.type(TOKEN)
        watched.page.keyboard.press("Enter")
        watched.page.wait_for_selector(WELL)
