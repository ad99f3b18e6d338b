"""``dynaplan export grafana``: a dashboard over a Prometheus server that has the deployments' metrics."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="grafana")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File; else it is printed."
)
def command(output: Path | None) -> None:
    """Write a dashboard for Grafana, which asks when it is imported for nothing but its name.

    It shows one deployment at a time, out of the Prometheus server that `dynaplan export prometheus`
    configures: load, latencies against targets, workers, caches and GPUs.
    """
    import json

    from dynaplan import wiring
    from dynaplan.cli.exporting.dashboard import dashboard
    from dynaplan.cli.exporting.writing import write_text

    write_text(json.dumps(dashboard(wiring.planning.metrics_prefix()), indent=1) + "\n", output)
