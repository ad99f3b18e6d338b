"""``dynaplan export TARGET``: files that another program needs of a deployment."""

from __future__ import annotations

import json
import os
import pwd
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.main import LazyGroup
from dynaplan.cli.options import (
    api_key_option,
    compat_option,
    config_file_option,
    namespace_argument,
    token_file_option,
)
from dynaplan.cli.service_options import ServiceOptionsCommand, is_models_file
from dynaplan.config.overrides import split_overrides
from dynaplan.config.settings.servers import KUBERNETES, NATS
from dynaplan.kubernetes.manifests import NONE, OPERATORS, manifests, too_large
from dynaplan.kubernetes.templates import read_template
from dynaplan.util.errors import ConfigError, DeploymentError
from dynaplan.util.masking import looks_secret, mask_secrets

if TYPE_CHECKING:
    from dynaplan.kubernetes.templates import Document

TARGETS = {
    "kubernetes": ("export:kubernetes", "The manifests that run a deployment in a cluster."),
    "crd": ("export:crd", "The kind of object that --store kubernetes needs, once in a cluster."),
    "prometheus": ("export:prometheus", "The configuration of a Prometheus server."),
    "systemd": ("export:systemd", "The unit that runs a deployment at boot."),
    "schema": ("export:schema", "The JSON schema of a YAML, for editors."),
    "grafana": ("export:grafana", "A dashboard over that server."),
}
"""Each target in the order of the help page: its command, and its purpose."""

SHORT = {"kube": "kubernetes", "k8s": "kubernetes", "unit": "systemd", "dashboard": "grafana"}

output_option = click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File; else it is printed."
)


@click.command(cls=LazyGroup, table=TARGETS, habits=SHORT, name="export")
def command() -> None:
    """Write what another program needs of a deployment that runs here."""


@click.command(
    cls=ServiceOptionsCommand, name="kubernetes", epilog="Any option of a service: --Service.key=value"
)
@click.argument("graph", required=False)
@config_file_option()
@click.option("--image", default="", help="Container image with dynaplan and the engine in it; required.")
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
@api_key_option
@token_file_option
@compat_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for a file of each object; without it they are printed.",
)
@click.pass_context
def kubernetes(
    ctx: click.Context,
    /,
    graph: str | None,
    config_file: str | None,
    operator: str,
    namespace: str | None,
    output: Path | None,
    **options: Any,
) -> None:
    """Write the Kubernetes manifests of GRAPH, or of the deployment that runs here.

    Frontend, workers with their GPUs, the planner with its settings and what it has learnt, and what they
    need: `kubectl apply` starts them.
    """
    # ``options`` are those that ClusterOptions has by the same names.
    from dynaplan.cli.serve import warn
    from dynaplan.kubernetes.description import ClusterOptions, cautions, describe
    from dynaplan.kubernetes.sources import graph_source, refuse_on_request, running_source

    if graph and is_models_file(graph):
        raise refuse_on_request()
    if not options["image"]:
        raise ConfigError(
            "--image is missing: the container image that the pods run, with dynaplan and the engine in it",
            hint="Build one with the Containerfile of dynaplan's repository:\n"
            "    podman build -t REGISTRY/dynaplan:1 --build-arg EXTRAS=vllm,kubernetes -f Containerfile .\n"
            "  Push it where the cluster reaches it, and name it: --image REGISTRY/dynaplan:1",
        )
    source = (
        graph_source(graph, config_file, namespace, ctx.obj) if graph else running_source(namespace, ctx.obj)
    )
    deployment = describe(source, ClusterOptions(**options))
    documents = manifests(deployment, operator)
    warn([*source.warnings, *cautions(source, deployment)])
    if names := too_large(documents):
        raise ConfigError(
            f"the ConfigMap {names[0]} would be larger than 1 MiB, which no API server takes",
            hint="Expected a smaller profile, trace or configuration: put the files into the image, or on a "
            "volume, and name their path there.",
        )
    if output:
        write_documents(documents, output)
    else:
        click.echo(yaml_of(documents), nl=False)
        click.echo("The Secret among them holds the workers' token: keep it to yourself.", err=True)


@click.command(name="crd")
def crd() -> None:
    """Write the definition of DynamoWorkerMetadata, which --store kubernetes needs once in a cluster.

    `dynaplan export crd | kubectl apply -f -` takes an administrator's rights. Dynamo's operator brings the
    definition along.
    """

    click.echo(read_template("crd.yaml"), nl=False)


@click.command(name="prometheus")
@namespace_argument
@output_option
def prometheus(namespace: str | None, output: Path | None) -> None:
    """Write the configuration of a Prometheus server for the deployments that run here.

    The server finds them by the file that each `dynaplan serve` keeps in its directory of logs, at whatever
    port, and reads all their metrics, /metrics/all.
    """
    from dynaplan.fleet.deployments import find_deployments
    from dynaplan.fleet.monitoring import prometheus_config

    write_text(prometheus_config(find_deployments(namespace)), output)


@click.command(
    name="systemd",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
    epilog="Every option of `dynaplan serve` goes into the unit: -f, --port, --Service.key=value ...",
)
@click.option(
    "--system", "is_system", is_flag=True, help="A unit of the system, not of the user: /etc/systemd/system."
)
@click.option("--user", help="With --system: the user as which it runs.  [default: this one]")
@output_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="GRAPH [OPTION OF SERVE]...")
def systemd(is_system: bool, user: str | None, output: Path | None, arguments: Sequence[str]) -> None:
    """Write a systemd unit for `dynaplan serve GRAPH ...`, to be run from this directory.

    It is ready when `serve` is, is watched, restarted after a failure, and gets the time to drain.
    """
    from dynaplan.fleet.systemd_unit import unit

    if user and not is_system:
        raise ConfigError(f"--user {user} is for --system", hint="A unit of the user runs as the user.")
    params = _params_of_serve(arguments)
    write_text(unit(arguments, params, Path.cwd(), (user or _login()) if is_system else ""), output)


def _params_of_serve(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options as ``serve`` parses them; raises its usage errors.

    Raises ConfigError for options that mean nothing in a systemd unit, and for secrets.
    """
    from dynaplan.cli.serve import command as serve

    try:
        params = serve.make_context("serve", list(arguments)).params
    except click.MissingParameter as error:
        raise ConfigError("which graph is the unit to serve?", hint=_graph_hint()) from error
    for name in ("detach", "dry_run"):
        if params[name]:
            raise ConfigError(f"--{name.replace('_', '-')} is nothing for a unit", hint="Leave it out.")
    if any(argument == "--api-key" or argument.startswith("--api-key=") for argument in arguments):
        raise ConfigError(
            "--api-key would stand in the unit, which everybody can read",
            hint="Leave it out, and write DYNAPLAN_API_KEY=... into the EnvironmentFile of the unit.",
        )
    for override in split_overrides(arguments)[0]:
        name, _, value = override.partition("=")
        is_number = value.strip().isdecimal()  # as that of long-prefill-token-threshold
        if (looks_secret(name) and not is_number) or mask_secrets(value) != value:
            raise ConfigError(
                f"{name} holds a secret, which would stand in the unit, and everybody can read that",
                hint="Leave it out, and write it into the file of -f, which only you can read.",
            )
    return params


def _graph_hint() -> str:
    """Return how to name the graph to export, with the command for each deployment that runs here."""
    from dynaplan.fleet.deployments import find_deployments
    from dynaplan.fleet.launch import read_launch

    lines = ["Write `dynaplan export systemd GRAPH`, with the options of `dynaplan serve`."]
    with suppress(DeploymentError, OSError, ValueError, KeyError, TypeError):
        for found in find_deployments():
            launch = read_launch(found.runtime_dir)
            words = [launch.graph.identifier, *(["-f", launch.config_file] if launch.config_file else [])]
            words += ["--namespace", found.namespace, "--port", str(found.port)]
            lines.append(f"{found.namespace}, which runs here, with the other options that it was given:")
            lines.append(
                f"  cd {shlex.quote(launch.graph.working_dir)} && dynaplan export systemd {shlex.join(words)}"
            )
    return "\n  ".join(lines)


def _login() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


@click.command(name="schema")
@output_option
def schema(output: Path | None) -> None:
    """Write the JSON schema of a deployment's YAML: an editor then knows every key and its values.

    A first line `# yaml-language-server: $schema=dynaplan.schema.json` names it to VS Code and others.
    """
    from dynaplan.config.schema import config_schema

    write_text(json.dumps(config_schema(), indent=1) + "\n", output)


@click.command(name="grafana")
@click.option(
    "--namespace", metavar="NAME", default="", help="The deployment that it shows first; it has them all."
)
@output_option
def grafana(namespace: str, output: Path | None) -> None:
    """Write a dashboard for Grafana, which asks when it is imported for nothing but its name.

    It shows one deployment at a time, out of the Prometheus server that `dynaplan export prometheus`
    configures: load, latencies against targets, workers, caches and GPUs.
    """
    from dynaplan.fleet.monitoring import dashboard
    from dynaplan.planner.metrics.exposition import metrics_prefix

    write_text(json.dumps(dashboard(metrics_prefix(), namespace), indent=1) + "\n", output)


def yaml_of(documents: Iterable[Document]) -> str:
    """Return the documents as one YAML text: texts of several lines as blocks, no anchors and aliases."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)


def write_documents(documents: Sequence[Document], directory: Path) -> None:
    """Write a file of each object, readable by this user alone; raises ConfigError where that fails."""
    files = {f"{each['kind'].lower()}-{each['metadata']['name']}.yaml": each for each in documents}
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, document in files.items():
            path = directory / name
            path.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(yaml_of([document]))
        others = sorted({each.name for each in directory.glob("*.yaml")} - files.keys())
    except OSError as error:
        raise ConfigError(
            f"--output {directory}: {error.strerror}", hint="Expected a directory of yours, or a new one."
        ) from error
    click.echo(f"{len(documents)} objects are in {directory}: kubectl apply -f {directory}")
    if others:
        click.echo(f"Warning: it has others, which are applied with them: {', '.join(others)}", err=True)


def write_text(text: str, path: Path | None) -> None:
    """Print the text, or write it into that file; raises ConfigError where that fails."""
    if path is None:
        click.echo(text, nl=False)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output {path}: {error.strerror}", hint="Expected a file that you may write, or a new one."
        ) from error
    click.echo(f"{path} is written.", err=True)
