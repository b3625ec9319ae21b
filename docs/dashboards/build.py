"""Makes the Grafana dashboard beside it: ``python docs/dashboards/build.py > docs/dashboards/tierkv.json``.

A list of panels says more than three thousand lines of JSON. Import the JSON into Grafana, or provision it.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

WIDTH = 24
HERE = '{instance=~"$instance"}'
HOST = '{instance=~"$instance", tier="host"}'
HIT = f"(sum(increase(tierkv_hit_tokens_total{HERE}[1h])) or vector(0))"
"""Nothing was hit yet: then there is no series, and the share is 0, not unknown."""
ASKED = f"increase(tierkv_asked_tokens_total{HERE}[1h])"
FAILED = 'outcome!="done"'


class Panel(NamedTuple):
    """``asked`` are pairs of an expression of Prometheus and the name of its series."""

    title: str
    asked: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    stacked: bool = False
    about: str = ""
    mappings: tuple[tuple[str, str, str], ...] = ()
    """Value, word, colour."""


def rate(metric: str, by: str, where: str = "") -> str:
    labels = ", ".join(filter(None, ('instance=~"$instance"', where)))
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def quantile(share: float) -> str:
    return f"histogram_quantile({share}, {rate('tierkv_edge_call_seconds_bucket', 'edge, le')})"


YES_NO = (("0", "no", "red"), ("1", "yes", "green"))
ILL = (("0", "closed", "green"), ("1", "open", "red"))

ROWS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        Panel("Ready", ((f"min(tierkv_ready{HERE})", "ready"),), kind="stat", width=4, mappings=YES_NO),
        Panel(
            "Health",
            (('tierkv_health{instance=~"$instance", state!="ok"} > 0', "{{instance}} {{state}}"),),
            kind="stat", width=4, about="Empty: all is well. The sentences are in `tierkv status` and on the page.",
        ),
        Panel("Breakers", ((f"tierkv_tier_breaker_open{HERE}", "{{tier}}"),), kind="stat", width=4, mappings=ILL),
        Panel("Sessions", ((f"sum(tierkv_sessions{HERE})", "sessions"),), kind="stat", width=4),
        Panel("Leases", ((f"sum(tierkv_leases{HERE})", "leases"),), kind="stat", width=4),
        Panel(
            "Full", ((f"tierkv_tier_used_bytes{HERE} / tierkv_tier_capacity_bytes{HERE}", "{{tier}}"),),
            "percentunit", "bargauge", 4,
        ),
    ),
    "Tokens that need not be computed": (
        Panel(
            "Tokens a second, by the tier that had them",
            (
                (rate("tierkv_hit_tokens_total", "tier"), "from {{tier}}"),
                (f"clamp_min(sum(deriv(tierkv_ceiling_tokens{HERE}[5m])), 0)", "ceiling"),
                (rate("tierkv_asked_tokens_total", "instance"), "asked for, {{instance}}"),
            ),
            stacked=True, width=16, about="The ceiling is what an endless cache would have given.",
        ),
        Panel(
            "Share of the last hour",
            (
                (f"{HIT} / sum({ASKED})", "hit"),
                (f"clamp_min(sum(delta(tierkv_ceiling_tokens{HERE}[1h])), 0) / sum({ASKED})", "ceiling"),
            ),
            "percentunit", "bargauge", 8,
        ),
        Panel("Blocks that a request did not get, by reason",
              ((rate("tierkv_missed_blocks_total", "reason"), "{{reason}}"),), stacked=True),
        Panel(
            "Blocks that left for good",
            (
                (rate("tierkv_gone_blocks_total", "reason"), "{{reason}}"),
                (rate("tierkv_never_served_blocks_total", "instance"), "never read, {{instance}}"),
            ),
        ),
    ),
    "Tiers": (
        Panel("Bytes used", ((f"sum by (tier) (tierkv_tier_used_bytes{HERE})", "{{tier}}"),), "bytes"),
        Panel(
            "Host RAM",
            (
                (f"sum(tierkv_tier_capacity_bytes{HOST})", "capacity"),
                (f"sum(tierkv_tier_used_bytes{HOST})", "used"),
                (f"sum(tierkv_host_clean_bytes{HERE})", "clean: may leave at once"),
                (f"sum(tierkv_pinned_bytes{HERE})", "pinned"),
            ),
            "bytes",
        ),
        Panel("Blocks that came", ((rate("tierkv_arrived_blocks_total", "tier"), "{{tier}}"),), stacked=True),
        Panel(
            "Blocks that left a tier",
            ((rate("tierkv_evicted_blocks_total", "tier, reason"), "{{tier}}: {{reason}}"),),
            stacked=True,
        ),
    ),
    "Edges": (
        Panel(
            "How long calls take",
            ((quantile(0.5), "{{edge}} p50"), (quantile(0.95), "{{edge}} p95"), (quantile(0.99), "{{edge}} p99")), "s",
        ),
        Panel(
            "Bytes moved",
            (
                (rate("tierkv_stored_bytes_total", "tier"), "into {{tier}}"),
                (rate("tierkv_written_bytes_total", "tier"), "host>{{tier}}"),
                (rate("tierkv_read_bytes_total", "tier"), "{{tier}}>host"),
            ),
            "Bps",
        ),
        Panel("Waiting or on their way", ((f"sum by (edge) (tierkv_edge_pending_bytes{HERE})", "{{edge}}"),), "bytes"),
        Panel("Measured speed", ((f"avg by (edge) (tierkv_edge_bytes_per_second{HERE})", "{{edge}}"),), "Bps"),
    ),
    "Trouble": (
        Panel("Blocks offered and not kept, by reason",
              ((rate("tierkv_dropped_blocks_total", "tier, reason"), "{{tier}}: {{reason}}"),), stacked=True),
        Panel(
            "Reads and writes that came to nothing",
            (
                (rate("tierkv_read_blocks_total", "tier, outcome", FAILED), "{{tier}} read: {{outcome}}"),
                (rate("tierkv_written_blocks_total", "tier, outcome", FAILED), "{{tier}} write: {{outcome}}"),
            ),
        ),
        Panel(
            "Damage, breakers, deadlines",
            (
                (rate("tierkv_corrupt_blocks_total", "tier, reason"), "corrupt in {{tier}}: {{reason}}"),
                (rate("tierkv_breaker_opened_total", "tier"), "{{tier}} left alone"),
                (rate("tierkv_load_deadline_total", "instance"), "loads past their deadline"),
                (rate("tierkv_leases_overdue_total", "instance"), "leases past their deadline"),
                (rate("tierkv_threads_restarted_total", "lane"), "thread of {{lane}} died"),
            ),
        ),
        Panel("Tenants", ((f"tierkv_tenant_bytes{HERE}", "{{tenant}} {{tier}}"),), "bytes"),
    ),
    "Process": (
        Panel("Memory", ((f"process_resident_memory_bytes{HERE}", "{{instance}}"),), "bytes"),
        Panel("CPU", ((f"rate(process_cpu_seconds_total{HERE}[$__rate_interval])", "{{instance}}"),), "percentunit"),
    ),
}  # fmt: skip


def _panel(panel: Panel, number: int, x: int, y: int, height: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    mappings = [
        {"type": "value", "options": {value: {"text": word, "color": colour}}}
        for value, word, colour in panel.mappings
    ]
    custom = {
        "fillOpacity": 25 if panel.stacked else 5,
        "stacking": {"mode": "normal" if panel.stacked else "none"},
    }
    lines = [{
        "matcher": {"id": "byRegexp", "options": "/^(ceiling|asked for).*/"},
        "properties": [
            {"id": "custom.stacking", "value": {"mode": "none"}},
            {"id": "custom.fillOpacity", "value": 0},
            {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 4]}},
        ],
    }]  # fmt: skip
    made: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": source, "expr": expression, "legendFormat": name}
            for place, (expression, name) in enumerate(panel.asked)
        ],
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "mappings": mappings},
            "overrides": [],
        },
        "options": {},
    }
    if panel.kind == "timeseries":
        made["fieldConfig"]["defaults"]["custom"] = custom
        made["fieldConfig"]["overrides"] = lines if panel.stacked else []
        made["options"] = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi"},
        }
    elif panel.unit == "percentunit":
        made["fieldConfig"]["defaults"]["max"] = 1
    return made


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
             "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}
        )  # fmt: skip
        y += 1
        height = 5 if title == "Now" else 8
        x = 0
        for panel in row:
            if x + panel.width > WIDTH:
                x, y = 0, y + height
            panels.append(_panel(panel, len(panels) + 1, x, y, height))
            x += panel.width
        y += height
    instances = {
        "name": "instance",
        "label": "daemon",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": {"query": "label_values(tierkv_build_info, instance)", "refId": "instances"},
        "definition": "label_values(tierkv_build_info, instance)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
    return {
        "uid": "tierkv",
        "title": "tierkv",
        "description": "A tiered store for KV caches: what is hit, what moves, what is wrong.",
        "tags": ["tierkv"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {
                    "name": "source",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                },
                instances,
            ]
        },
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
