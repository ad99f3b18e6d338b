"""Grafana's dashboard of a deployment, as JSON: its charts, and their queries to a Prometheus server.

Every query reads the metrics of ``/metrics/all`` and of one namespace, the dashboard's variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 39
"""The version of Grafana's form of dashboards that this is: Grafana 11's. Later ones read it, too."""

COLUMNS, HEIGHT = 24, 8
"""The columns of Grafana's grid, and the rows of it that a chart takes."""

TARGET = "target"
"""The legend of a target, whose line is dashed."""

QUANTILES = (0.5, 0.95, 0.99)

FRONTEND = "%frontend"
"""The beginning of the names of the frontends' metrics, which ``DYN_METRICS_PREFIX`` may change."""

OF_ENGINES = ',role=~"prefill|decode"'
"""The labels of workers with engines, in a selector after the namespace."""

COMPUTING = ',dynamo_component!~"Frontend|Planner"'
"""The same for metrics that do not tell the role, which stock services without engines have, too."""

SOURCE: Mapping[str, str] = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class DashboardChart:
    """One chart over time: ``queries`` are legend -> PromQL, ``unit`` is a name of Grafana's."""

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    about: str = ""
    columns: int = 8


def _of(name: str, labels: str = "") -> str:
    """Return the selector of a metric's samples of the chosen namespace."""
    return f'{name}{{dynamo_namespace="$namespace"{labels}}}'


def _rate(name: str) -> str:
    return f"rate({_of(name)}[$__rate_interval])"


def _by_worker(name: str) -> str:
    """Return the query of a gauge that workers have, by those with engines."""
    return f"max by (worker) ({_of(f'dynamo_component_{name}', COMPUTING)})"


def _times(name: str, target_ms: str) -> dict[str, str]:
    """Return the queries of a latency: its percentiles, its mean and its target, in seconds."""
    name = f"{FRONTEND}_{name}_seconds"
    percentiles = {
        f"p{part * 100:g}": f"histogram_quantile({part:g}, sum by (le) ({_rate(f'{name}_bucket')}))"
        for part in QUANTILES
    }
    mean = f"sum({_rate(f'{name}_sum')}) / sum({_rate(f'{name}_count')})"
    return {**percentiles, "mean": mean, TARGET: f"max({_of(target_ms)}) / 1000"}


LOAD = (
    DashboardChart(
        "Requests",
        {
            "{{status}}": f"sum by (status) ({_rate(f'{FRONTEND}_requests_total')})",
            "forecast": f"max({_of('dynamo_planner_predicted_requests_per_second')})",
        },
        "reqps",
        "Requests that ended per second, and the planner's forecast for its next interval.",
    ),
    DashboardChart(
        "Tokens",
        {
            "prompts": f"sum({_rate(f'{FRONTEND}_input_sequence_tokens_sum')})",
            "answers": f"sum({_rate(f'{FRONTEND}_output_tokens_total')})",
        },
        "short",
        "Tokens per second. Prompts count when their answer is complete.",
    ),
    DashboardChart(
        "Requests that wait",
        {
            "without a first token": f"sum({_of(f'{FRONTEND}_queued_requests')})",
            "prefill queue": f"max({_of('dynamo_planner_prefill_queue_size')})",
            "in {{worker}}": _by_worker("num_requests_waiting"),
        },
    ),
)
LATENCIES = (
    DashboardChart(
        "Time to first token", _times("time_to_first_token", "dynamo_planner_sla_target_ttft_ms"), "s"
    ),
    DashboardChart(
        "Inter-token latency", _times("inter_token_latency", "dynamo_planner_sla_target_itl_ms"), "s"
    ),
    DashboardChart(
        "Error budget",
        {
            "TTFT": f"max({_of('dynamo_planner_error_budget_ttft_requests')})",
            "ITL": f"max({_of('dynamo_planner_error_budget_itl_requests')})",
        },
        about="Requests that may still miss the target; below 0 too many have.",
    ),
)
WORKERS = (
    DashboardChart(
        "Workers",
        {
            "{{role}} desired": f"max by (role) ({_of('dynaplan_desired_workers')})",
            "{{role}} {{state}}": f"sum by (role, state) ({_of('dynaplan_worker_state', OF_ENGINES)})",
        },
        "none",
    ),
    DashboardChart(
        "Restarts",
        {"{{worker}}": f"max by (worker) ({_of('dynaplan_worker_recent_restarts')})"},
        "none",
        "Crashes of each worker that still count to the limit of restarts.",
    ),
    DashboardChart(
        "Requests at work",
        {"{{worker}}": _by_worker("request_active_slots")},
    ),
)
CACHES = (
    DashboardChart(
        "KV cache in use",
        {"{{worker}}": _by_worker("kvstats_gpu_cache_usage_percent")},
        "percentunit",
    ),
    DashboardChart(
        "Prompts found in caches",
        {
            "all requests": f"sum({_rate(f'{FRONTEND}_cached_tokens_sum')}) "
            f"/ sum({_rate(f'{FRONTEND}_input_sequence_tokens_sum')})",
            "{{worker}}": _by_worker("kvstats_gpu_prefix_cache_hit_rate"),
        },
        "percentunit",
        "Part of the prompts' tokens whose KV entries were there, as far as engines tell.",
    ),
    DashboardChart(
        "Places of prefills",
        {"{{place}}": f"sum by (place) ({_rate(f'{FRONTEND}_prefills_total')})"},
        "reqps",
    ),
)
GPUS = (
    DashboardChart(
        "GPUs",
        {
            "held": f"count(count by (gpu) ({_of('dynaplan_gpu_held')})) or vector(0)",
            "there": f"count({_of('dynaplan_gpu_memory_bytes')})",
        },
        "none",
        columns=6,
    ),
    DashboardChart(
        "GPU memory in use",
        {
            "{{gpu}}": f"max by (gpu) ({_of('dynaplan_gpu_memory_used_bytes')}) "
            f"/ max by (gpu) ({_of('dynaplan_gpu_memory_bytes')})"
        },
        "percentunit",
        columns=6,
    ),
    DashboardChart(
        "GPU utilisation",
        {"{{gpu}}": f"max by (gpu) ({_of('dynaplan_gpu_utilisation')})"},
        "percentunit",
        columns=6,
    ),
    DashboardChart(
        "GPU power", {"{{gpu}}": f"max by (gpu) ({_of('dynaplan_gpu_watts')})"}, "watt", columns=6
    ),
)
ROWS: Mapping[str, tuple[DashboardChart, ...]] = {
    "Load": LOAD,
    "Latencies": LATENCIES,
    "Workers": WORKERS,
    "Caches": CACHES,
    "GPUs": GPUS,
}


def dashboard(prefix: str) -> dict[str, Any]:
    """Return the dashboard; ``prefix`` is the beginning of the names of the frontends' metrics."""
    return {
        "uid": "dynaplan",
        "title": "dynaplan",
        "tags": ["dynaplan"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": SCHEMA_VERSION,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_source_variable(), _namespace_variable()]},
        "panels": list(_panels(prefix)),
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _namespace_variable() -> dict[str, Any]:
    query = "label_values(dynaplan_worker_state, dynamo_namespace)"
    return {
        "name": "namespace",
        "label": "Deployment",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "namespace"},
        "refresh": 2,
        "sort": 1,
    }


def _panels(prefix: str) -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for title, charts in ROWS.items():
        number += 1
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": place,
        }
        x, y = 0, y + 1
        for chart in charts:
            number += 1
            yield _panel(number, chart, {"x": x, "y": y, "w": chart.columns, "h": HEIGHT}, prefix)
            x += chart.columns
        y += HEIGHT


def _panel(number: int, chart: DashboardChart, place: Mapping[str, int], prefix: str) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": chart.title,
        "description": chart.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": chart.unit, "custom": {"fillOpacity": 5, "showPoints": "never"}},
            "overrides": _overrides(chart.queries),
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + place_of_query),
                "datasource": SOURCE,
                "expr": query.replace(FRONTEND, prefix),
                "legendFormat": legend,
            }
            for place_of_query, (legend, query) in enumerate(chart.queries.items())
        ],
    }


def _overrides(legends: Iterable[str]) -> list[dict[str, Any]]:
    """Return how the line of a target differs from the others."""
    if TARGET not in legends:
        return []
    properties = [
        {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}},
        {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}},
    ]
    return [{"matcher": {"id": "byName", "options": TARGET}, "properties": properties}]
