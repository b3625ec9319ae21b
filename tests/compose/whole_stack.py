"""docker-compose.yml as it is, from the images to the end: the demo's result, an engine that offloads through the
sidecar, the dashboards' data, and Valkey and the sidecar killed in between.

``make test-compose`` runs this file alone; where there is no Docker engine it says why and skips. Each test goes on
where the one before has ended.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.compose.engine import NoEngine, compose_command, docker_engine
from tests.compose.images import CannotHave, base_image, provide
from tests.compose.stack import Stack, until
from tests.compose.wheels import download, served
from tests.daemon_process import ROOT

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierkv" / "compose"
"""Packages, and the images of an engine that was started for the tests: a second run finds them there."""
BUILD_S = 1800.0
DEMO_S = 1800.0
SIDECAR_MOST_BYTES = 250 * 10**6
DASHBOARDS = ("prometheus", "grafana")
ROUND = re.compile(r"round (\d+), .*: (\d+) of (\d+) tokens reused")


def say(line: str) -> None:
    print(f"\n  {line}", end="", file=sys.stderr, flush=True)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """All services whose images are to be had, started as ``docker compose up`` does it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        with docker_engine(CACHE) as environ:
            services, left_out = _with_images(environ)
            with served(download(CACHE, os.environ["TORCH"])) as index:
                stack = Stack(compose_command() or (), {**environ, "PIP_INDEX_URL": index})
                stack.compose("build", limit_s=BUILD_S)
            yield from _running(stack, [name for name in services if name not in left_out])
    except NoEngine as why:
        pytest.skip(str(why))


def _with_images(environ: dict[str, str]) -> tuple[list[str], set[str]]:
    """All services, and those for which there is no image. Without what the store itself needs, the tests skip."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    wanted = {name: one for name, one in services.items() if "profiles" not in one}
    left_out = set()
    needed = {name: one["image"] for name, one in wanted.items() if "build" not in one}
    for name, image in {"the Dockerfile": base_image(), **needed}.items():
        try:
            say(provide(image, environ))
        except CannotHave as why:
            if name not in DASHBOARDS:
                pytest.skip(str(why))
            left_out.add(name)
            say(f"left out: {why}")
    return list(wanted), left_out


def _running(stack: Stack, services: list[str]) -> Iterator[Stack]:
    down = ("down", "--volumes", "--remove-orphans")
    stack.compose(*down)  # what a run that was killed has left
    try:
        # What waits for the demo's end is started when that end was seen.
        stack.compose("up", "--detach", "--no-build", *[name for name in services if name != "engine"])
        yield stack
    finally:
        stack.compose(*down)
        if "DOCKER_HOST" in stack.environ:  # an engine of the tests' own, which nobody else tidies
            stack.docker("container", "prune", "--force")
            stack.docker("image", "prune", "--force", limit_s=BUILD_S)


def reuse(stack: Stack) -> list[tuple[int, int]]:
    """Of each answer of the engine so far: which round, how many tokens it did not compute."""
    found = [ROUND.match(line) for line in stack.log("engine")]
    return [(int(one[1]), int(one[2])) for one in found if one]


def answers_more(stack: Stack, most: int = 2) -> None:
    """The engine goes on: it gives so many further answers."""
    before = len(reuse(stack))
    until(lambda: len(reuse(stack)) >= before + most, f"{most} more answers of the engine")


def healthy(stack: Stack) -> bool:
    return stack.answer("sidecar", 9400, "/healthz") is not None


def metric(stack: Stack, name: str) -> float:
    """All of its values together."""
    text = stack.answer("sidecar", 9400, "/metrics", stack.token())
    assert text is not None
    families = text_string_to_metric_families(text)
    return sum(one.value for family in families for one in family.samples if one.name == name)


def test_the_image_of_the_sidecar_is_small_and_has_no_torch(stack: Stack) -> None:
    sizes = {
        image: int(stack.docker("image", "inspect", "--format", "{{.Size}}", image))
        for image in (base_image(), "tierkv", "tierkv-demo")
    }
    python, sidecar, demo = (f"{size / 10**6:.0f} MB" for size in sizes.values())
    say(f"image of the sidecar: {sidecar}, of these {python} Python's; of the demo: {demo}")
    assert sizes["tierkv"] < SIDECAR_MOST_BYTES
    torch = "import importlib.util as util; print(util.find_spec('torch'))"
    assert stack.compose("exec", "-T", "sidecar", "python", "-c", torch).strip() == "None"


def test_the_sidecar_has_no_rights_that_it_does_not_need(stack: Stack) -> None:
    inside = "import os; print(os.getuid(), open('/proc/self/status').read().split('CapEff:')[1].split()[0])"
    assert stack.compose("exec", "-T", "sidecar", "python", "-c", inside).split() == ["10001", "0" * 16]
    with pytest.raises(AssertionError, match="Read-only file system"):
        stack.compose("exec", "-T", "sidecar", "python", "-c", "open('/home/tierkv/x', 'w')")
    until(
        lambda: stack.inspect("sidecar", "{{.State.Health.Status}}").strip() == "healthy", "its health check"
    )


def test_the_demo_gets_its_blocks_back_from_every_tier(stack: Stack) -> None:
    started_s = time.monotonic()
    status = stack.docker("wait", stack.container("demo"), limit_s=DEMO_S).strip()
    log = "\n".join(stack.log("demo"))
    say(f"the demo's end after {time.monotonic() - started_s:.0f} s: {status}")
    assert status == "0", log
    assert "WRONG" not in log


def test_an_engine_stores_and_takes_its_blocks_through_the_sidecar(stack: Stack) -> None:
    stack.compose(
        "up", "--detach", "--no-build", "--no-deps", "engine"
    )  # with them, the demo would start again
    until(lambda: any(number > 1 and reused for number, reused in reuse(stack)), "reuse in the second round")
    status = stack.status()
    assert "shared_engine.py" in {one["owner"] for one in status["sessions"]["sessions"]}
    assert metric(stack, "tierkv_stored_blocks_total") > 0
    assert metric(stack, "tierkv_hit_tokens_total") > 0
    assert healthy(stack)
    assert stack.answer("sidecar", 9400, "/metrics") is None, "not without the token"


def test_prometheus_scrapes_it_and_knows_the_alerts(stack: Stack) -> None:
    if not stack.container("prometheus"):
        pytest.skip("there is no image of Prometheus here")

    def value(query: str) -> float | None:
        text = stack.answer("prometheus", 9090, f"/api/v1/query?query={query}")
        found = json.loads(text)["data"]["result"] if text else []
        return float(found[0]["value"][1]) if found else None

    until(lambda: value("up") == 1, "Prometheus reaches the sidecar")
    until(lambda: (value("sum(tierkv_stored_blocks_total)") or 0) > 0, "it has the counters")
    rules = json.loads(stack.answer("prometheus", 9090, "/api/v1/rules") or "{}")
    named = {rule["name"] for group in rules["data"]["groups"] for rule in group["rules"]}
    written = yaml.safe_load((ROOT / "docs/dashboards/alerts.yml").read_text())
    assert named == {rule["alert"] for group in written["groups"] for rule in group["rules"]}


def test_grafana_answers(stack: Stack) -> None:
    if not stack.container("grafana"):
        pytest.skip("there is no image of Grafana here")
    until(lambda: stack.answer("grafana", 3000, "/api/health"), "Grafana answers")


def test_a_killed_valkey_server_is_missed_by_nobody_and_found_again(stack: Stack) -> None:
    stack.compose("kill", "valkey")
    answers_more(stack)
    assert healthy(stack)
    stack.compose("up", "--detach", "--no-build", "valkey")
    until(lambda: stack.inspect("valkey", "{{.State.Health.Status}}").strip() == "healthy", "Valkey is back")
    until(lambda: stack.status()["health"]["state"] == "ok", "the sidecar has found it again")


def test_a_killed_sidecar_comes_back_and_the_engine_uses_it_again(stack: Stack) -> None:
    stack.compose("kill", "sidecar")
    before = len(reuse(stack))
    answers_more(stack)
    assert reuse(stack)[before + 1][1] == 0, "nobody to take blocks from"
    with stack.start_compose("up", "--detach", "--no-build", "sidecar") as command:
        until(lambda: healthy(stack), "the sidecar is back", look_s=0.01)
        ready_at = time.time()
        assert command.wait() == 0
    say(f"the sidecar answers {ready_at - stack.started_at('sidecar'):.2f} s after its container started")
    before = len(reuse(stack))
    until(lambda: any(reused for _, reused in reuse(stack)[before:]), "the engine takes blocks from it again")
    assert stack.status()["health"]["state"] == "ok"
