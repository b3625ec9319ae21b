"""The dashboard and the alerts ask for what a daemon tells: every metric, every label; and the alerts fire when they
should, as far as promtool is there to say so."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.daemon_process import ROOT
from tests.page_support import Traffic, watched_daemon

FOLDER = ROOT / "docs" / "dashboards"
ADDED_BY_PROMETHEUS = {"instance", "job", "le"}
_WORDS = re.compile(r"\b(?:tierkv|process)_\w+")
_CHOSEN = re.compile(r"((?:tierkv|process)_\w+)\{([^}]*)\}")
_BY = re.compile(r"\b(?:by|on) \(([^)]*)\)")


def dashboard() -> dict[str, Any]:
    made: dict[str, Any] = json.loads((FOLDER / "tierkv.json").read_text())
    return made


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def expressions() -> list[str]:
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    return [*panels, *(rule["expr"] for rule in rules())]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of every metric that a daemon under traffic tells, by name; none where it has no series yet."""
    with watched_daemon(tmp_path_factory.mktemp("dashboards")) as daemon:
        with Traffic(daemon) as traffic:
            while daemon.metrics().get(("tierkv_hit_tokens_total", (("tier", "host"),)), 0) < 100:
                pass
            traffic.stop()
        text = daemon.ask("/metrics")[1]
    found: dict[str, set[str]] = {}
    for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE):
        found[name] = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_file_is_what_its_builder_makes() -> None:
    made = runpy.run_path(str(FOLDER / "build.py"))["dashboard"]()
    assert dashboard() == made, "renew it: python docs/dashboards/build.py > docs/dashboards/tierkv.json"


def test_every_metric_that_is_asked_for_is_told(told: dict[str, set[str]]) -> None:
    asked = {name for expression in expressions() for name in _WORDS.findall(expression)}
    assert len(asked) > 30
    assert asked - set(told) == set()


def test_every_label_that_is_asked_for_is_there(told: dict[str, set[str]]) -> None:
    from tierkv.daemon.exposition import GAUGES, HISTOGRAMS
    from tierkv.metrics import METRICS

    known = {f"tierkv_{one.name}": set(one.labels) for one in (*METRICS, *GAUGES, *HISTOGRAMS)}
    every = set().union(*known.values()) | ADDED_BY_PROMETHEUS
    for expression in expressions():
        for name, chosen in _CHOSEN.findall(expression):
            labels = set(re.findall(r"(\w+)\s*[=!]", chosen)) - ADDED_BY_PROMETHEUS
            base = re.sub(r"_(bucket|count|sum)$", "", name) if name not in known else name
            assert labels <= known.get(base, set()), f"{name} has no {labels}"
        for words in _BY.findall(expression):
            assert {word.strip() for word in words.split(",")} <= every, expression
    for name, labels in told.items():
        if labels and name in known:
            assert labels == known[name]


def test_the_search_has_teeth(told: dict[str, set[str]]) -> None:
    assert set(_WORDS.findall('rate(tierkv_nothing_total{tier="x"}[5m])')) - set(told) == {
        "tierkv_nothing_total"
    }


def test_what_operators_fear_has_an_alert() -> None:
    names = {rule["alert"] for rule in rules()}
    assert names >= {
        "TierkvDown",
        "TierkvHealthyButNeverServing",
        "TierkvEvictedBeforeFirstReuse",
        "TierkvBreakerOpen",
        "TierkvArenaPressure",
        "TierkvDrops",
    }
    for rule in rules():
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
    tried = (FOLDER / "alerts_test.yml").read_text()
    assert all(name in tried for name in names), "an alert that is never tried"


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_alerts_fire_when_they_should() -> None:
    promtool = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus), or name it in PROMTOOL")
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        ran = subprocess.run([promtool, *command], cwd=FOLDER, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_expressions_of_the_dashboard_are_sound(tmp_path: Path) -> None:
    promtool = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus), or name it in PROMTOOL")
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    recorded = [
        {"record": f"x:{place}", "expr": expression.replace("$__rate_interval", "1m")}
        for place, expression in enumerate(panels)
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": recorded}]}))
    ran = subprocess.run(
        [promtool, "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
