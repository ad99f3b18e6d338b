"""``dynaplan export TARGET``: files that another program needs of a deployment."""

from __future__ import annotations

import click

from dynaplan.cli.lazy_group import LazyGroup

TARGETS = {
    "kubernetes": ("exporting.kubernetes", "The manifests that run a deployment in a cluster."),
    "crd": ("exporting.crd", "The kind of object that --store kubernetes needs, once in a cluster."),
    "prometheus": ("exporting.prometheus", "The configuration of a Prometheus server."),
    "systemd": ("exporting.systemd", "The unit that runs a deployment at boot."),
    "schema": ("exporting.schema", "The JSON schema of a YAML, for editors."),
    "grafana": ("exporting.grafana", "A dashboard over that server."),
}
"""Each target in the order of the help page: the module of its command, and its purpose."""


@click.command(cls=LazyGroup, table=TARGETS, name="export")
def command() -> None:
    """Write what another program needs of a deployment that runs here."""
