"""``dynaplan export crd``: the definition of the objects by which workers tell of themselves in a cluster."""

from __future__ import annotations

import click


@click.command(name="crd")
def command() -> None:
    """Write the definition of DynamoWorkerMetadata, which --store kubernetes needs once in a cluster.

    `dynaplan export crd | kubectl apply -f -` takes an administrator's rights. Dynamo's operator brings the
    definition along.
    """
    from dynaplan.cli.exporting.writing import yaml_of
    from dynaplan.core.manifests.worker_metadata import worker_metadata_definition

    click.echo(yaml_of([worker_metadata_definition()]), nl=False)
