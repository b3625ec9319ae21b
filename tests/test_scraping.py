"""Who scrapes a daemon, as the docs say it, finds it; and the alerts know whom they are about."""

from __future__ import annotations

import re

import yaml

from tests.test_dashboards import FOLDER, rules
from tests.test_deploying import manifests, sidecar_pod


def test_a_daemon_that_is_down_is_seen_whoever_scrapes_it() -> None:
    monitor, pods = manifests()["PodMonitor"], manifests()["DaemonSet"]["spec"]["template"]
    (scraped,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    (down,) = (rule["expr"] for rule in rules() if rule["alert"] == "TierkvDown")
    pattern = down.partition('job=~"')[2].partition('"')[0]
    for job in (scraped["job_name"], f"monitoring/{monitor['metadata']['name']}"):
        assert re.fullmatch(pattern, job), job
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (container,) = sidecar_pod()["containers"]
    assert endpoint["port"] in {port["name"] for port in container["ports"]}
    secret = manifests()["Secret"]
    assert endpoint["authorization"]["credentials"]["name"] == secret["metadata"]["name"]
    assert endpoint["authorization"]["credentials"]["key"] in secret["stringData"]
