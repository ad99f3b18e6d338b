"""What Prometheus and Grafana need of a deployment: where its metrics are, and charts of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynaplan.config.settings.servers import CA_VARIABLE
from dynaplan.fleet.deployments import RunningDeployment
from dynaplan.fleet.prometheus_targets import TARGETS_FILE
from dynaplan.http.routes import ALL_METRICS_PATH

SCRAPE_INTERVAL_S = 5
"""Seconds between two scrapes: the planner and the engines have new values every few seconds."""

HEAD = "# prometheus --config.file=THIS_FILE: it finds the metrics after later starts, too.\n"

DASHBOARD = Path(__file__).parents[1] / "data" / "grafana.json"

USUAL_PREFIX = "dynamo_frontend_"
"""The beginning of the frontends' metrics in the dashboard, which ``DYN_METRICS_PREFIX`` may change."""


def prometheus_config(deployments: Sequence[RunningDeployment]) -> str:
    """Return the configuration of a Prometheus server, with a job for each deployment."""
    import yaml

    jobs = [_scrape_job(deployment) for deployment in deployments]
    return HEAD + yaml.safe_dump({"scrape_configs": jobs}, sort_keys=False, width=110)


def _scrape_job(deployment: RunningDeployment) -> dict[str, Any]:
    """Return the job of one deployment; the file of its targets names their scheme."""
    authority = deployment.environment().get(CA_VARIABLE)
    return {
        "job_name": f"dynaplan-{deployment.namespace}",
        "scrape_interval": f"{SCRAPE_INTERVAL_S}s",
        "metrics_path": ALL_METRICS_PATH,
        **({"tls_config": {"ca_file": authority}} if authority else {}),
        "file_sd_configs": [{"files": [_pattern(deployment.log_dir / TARGETS_FILE)]}],
    }


def _pattern(path: Path) -> str:
    """Return the pattern of this one file, as Go's ``filepath.Match`` reads it."""
    return re.sub(r"([?\[\\])", r"\\\1", str(path))


def dashboard(prefix: str, namespace: str = "") -> dict[str, Any]:
    """Return Grafana's dashboard of all deployments, which begins with that of ``namespace``.

    ``prefix`` is the beginning of the names of the frontends' metrics.
    """
    text = DASHBOARD.read_text(encoding="utf-8").replace(USUAL_PREFIX, f"{prefix}_")
    document: dict[str, Any] = json.loads(text)
    if namespace:
        chosen = {"text": namespace, "value": namespace, "selected": True}
        (variable,) = (each for each in document["templating"]["list"] if each["name"] == "namespace")
        variable["current"] = chosen
    return document
