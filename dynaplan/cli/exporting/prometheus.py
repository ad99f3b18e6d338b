"""``dynaplan export prometheus``: the configuration of a Prometheus server that watches what runs here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.deployment import namespace_option

if TYPE_CHECKING:
    from dynaplan.supervisor.deployments import RunningDeployment

SCRAPE_INTERVAL_S = 5
"""Seconds between two scrapes: the planner and the engines tell something new every few seconds."""

HEAD = "# prometheus --config.file=THIS_FILE: it finds the metrics after later starts, too.\n"


@click.command(name="prometheus")
@namespace_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File; else it is printed."
)
def command(namespace: str | None, output: Path | None) -> None:
    """Write the configuration of a Prometheus server for the deployments that run here.

    The server finds them by the file that each `dynaplan serve` keeps in its directory of logs, at whatever
    port, and reads all their metrics, /metrics/all.
    """
    import yaml

    from dynaplan.cli.exporting.writing import write_text
    from dynaplan.supervisor.deployments import find_deployments

    jobs = [scrape_job(each) for each in find_deployments(namespace)]
    write_text(HEAD + yaml.safe_dump({"scrape_configs": jobs}, sort_keys=False, width=110), output)


def scrape_job(found: RunningDeployment) -> Mapping[str, Any]:
    """Return the scrape configuration of one deployment; its targets tell whether they speak https."""
    from dynaplan.domain.routes import ALL_METRICS_PATH
    from dynaplan.domain.settings.tls import CA_VARIABLE
    from dynaplan.supervisor.upkeep.prometheus_targets import TARGETS_FILE

    authority = found.environment().get(CA_VARIABLE)
    return {
        "job_name": f"dynaplan-{found.namespace}",
        "scrape_interval": f"{SCRAPE_INTERVAL_S}s",
        "metrics_path": ALL_METRICS_PATH,
        **({"tls_config": {"ca_file": authority}} if authority else {}),
        "file_sd_configs": [{"files": [_as_pattern(found.log_dir / TARGETS_FILE)]}],
    }


def _as_pattern(path: Path) -> str:
    """Return the pattern of this one file, as Go's ``filepath.Match`` reads it."""
    return re.sub(r"([?\[\\])", r"\\\1", str(path))
