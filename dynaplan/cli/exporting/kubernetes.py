"""``dynaplan export kubernetes``: the manifests of a deployment that runs here, or of a graph."""

from __future__ import annotations

from pathlib import Path

import click

from dynaplan.cli.components.shared_options import token_file_option
from dynaplan.cli.overriding import OverridingCommand
from dynaplan.cli.starting.serve import compat_option
from dynaplan.core.manifests.documents import NONE, OPERATORS
from dynaplan.domain.settings.servers import KUBERNETES, NATS


@click.command(
    cls=OverridingCommand, name="kubernetes", epilog="Any option of a service: --Service.key=value"
)
@click.argument("graph", required=False)
@click.option("-f", "--config-file", metavar="FILE", help="YAML, as of `dynaplan serve`.")
@click.option("--image", required=True, help="Container image with dynaplan and the engine in it.")
@click.option(
    "--operator",
    type=click.Choice(OPERATORS),
    default=NONE,
    show_default=True,
    help="dynamo writes a DynamoGraphDeployment for NVIDIA Dynamo's operator.",
)
@click.option(
    "--namespace",
    envvar="DYN_NAMESPACE",
    default=None,
    help="Without GRAPH the deployment that runs here; with it the name of the new one.",
)
@click.option("--name", default=None, help="Beginning of the objects' names.  [default: the namespace]")
@click.option("--kubernetes-namespace", default="", help="Namespace of the objects; default: kubectl's.")
@click.option(
    "--store",
    type=click.Choice((NATS, KUBERNETES)),
    default=None,
    help="Key-value store: a NATS server (the default), or the cluster's API, which needs no server.",
)
@click.option("--nats", metavar="URL", default="", help="A NATS server of yours, in place of one of its own.")
@click.option("--etcd", metavar="URL", default="", help="An etcd of yours to be the key-value store.")
@click.option(
    "--volume-claim",
    "volume_claims",
    metavar="CLAIM:/PATH",
    multiple=True,
    help="A PersistentVolumeClaim with models, for frontends and workers; may be repeated.",
)
@click.option(
    "--api-key", envvar="DYNAPLAN_API_KEY", default="", help="Ask for this key; better as the variable."
)
@token_file_option
@compat_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for a file of each object; without it they are printed.",
)
@click.pass_context
def command(
    ctx: click.Context,
    graph: str | None,
    config_file: str | None,
    image: str,
    operator: str,
    namespace: str | None,
    name: str | None,
    kubernetes_namespace: str,
    store: str | None,
    nats: str,
    etcd: str,
    volume_claims: tuple[str, ...],
    api_key: str,
    token_file: Path | None,
    output: Path | None,
) -> None:
    """Write the Kubernetes manifests of GRAPH, or of the deployment that runs here.

    Frontend, workers with their GPUs, the planner with its settings and what it has learnt, and what they
    need: `kubectl apply` starts them.
    """
    from dynaplan.cli.exporting.describing import Wishes, described
    from dynaplan.cli.exporting.sources import of_graph, of_running
    from dynaplan.cli.exporting.writing import print_documents, write_documents
    from dynaplan.cli.starting.serve import warn
    from dynaplan.core.manifests.documents import manifests, too_large
    from dynaplan.domain.errors import ConfigError

    source = of_graph(graph, config_file, namespace, ctx.obj) if graph else of_running(namespace, ctx.obj)
    wishes = Wishes(
        image, name, kubernetes_namespace, nats, etcd, store or "", volume_claims, api_key, token_file
    )
    deployment, warnings = described(source, wishes)
    documents = manifests(deployment, operator)
    warn(warnings)
    if names := too_large(documents):
        raise ConfigError(
            f"the ConfigMap {names[0]} would be larger than 1 MiB, which no API server takes",
            hint="Expected a smaller profile, trace or configuration: put the files into the image, or on a "
            "volume, and name their path there.",
        )
    if output:
        write_documents(documents, output)
    else:
        print_documents(documents)
