"""``dynaplan serve GRAPH``: run a whole graph on this box."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.main import OWN_PROCESS
from dynaplan.cli.options import (
    GpuNumber,
    api_key_option,
    compat_option,
    config_file_option,
    store_option,
    tls_options,
    token_file_option,
)
from dynaplan.cli.running_deployment import make_paths_absolute
from dynaplan.cli.service_options import (
    ARGUMENTS,
    GRAPH_OF_A_MODEL,
    GRAPH_OF_MODELS,
    ServeCommand,
    file_for,
    is_model,
    is_models_file,
    model_override,
    models_overrides,
    refuse_what_is_no_graph,
    serve_command,
)
from dynaplan.config.settings.fields import kebab
from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.config.settings.worker import ProcessSettings
from dynaplan.fleet import WORKER_PROGRAM
from dynaplan.process.signals import ended_by_sigint
from dynaplan.util import screen
from dynaplan.util.amounts import bytes_of, unit_missing
from dynaplan.util.descriptors import raise_descriptor_limit
from dynaplan.util.errors import GraphError
from dynaplan.util.log_lines import FORMAT_VARIABLE
from dynaplan.util.sockets import listens_on_loopback

if TYPE_CHECKING:
    from dynaplan.config.overrides import Sections
    from dynaplan.graph.model import GraphSpec
    from dynaplan.process.supervisor_link import SupervisorLink

FORK_VARIABLE = "DYNAPLAN_FORK_WORKERS"

ON_EVENT_VARIABLE = "DYNAPLAN_ON_EVENT"
"""The variable of ``fleet/event_hook.py``, which the help page need not import."""


@click.command(
    cls=ServeCommand,
    name="serve",
    epilog="Any option of a service: --Service.key=value",
)
@click.argument("graphs", metavar="GRAPH...", nargs=-1, required=True)
@config_file_option("YAML; looked up here, then beside the graph's module.")
@click.option(
    "-p",
    "--port",
    type=click.IntRange(0, 65535),
    envvar="DYNAMO_PORT",
    help=f"Default: {FrontendSettings.port}.",
)
@click.option("--host", envvar="DYNAMO_HOST", help=f"Default: {FrontendSettings.host}.")
@click.option(
    "--service-name", envvar="DYNAMO_SERVICE_NAME", default="", help="Serve only this service of the graph."
)
@click.option(
    "--working-dir", type=click.Path(path_type=Path), help="Where to import and run; default: here."
)
@click.option(
    "--dry-run", is_flag=True, help="Validate, print the configuration and the GPU map, start nothing."
)
@click.option(
    "--show-env", is_flag=True, help="With --dry-run: also the variable that holds the configuration."
)
@click.option(
    "--gpus",
    type=GpuNumber(),
    help="Use this many GPUs, or all; simulated when there is no NVIDIA driver.",
)
@click.option(
    "--model-memory",
    "model_memory_bytes",
    metavar="SIZE",
    default="",
    callback=lambda ctx, parameter, text: memory_size(text),
    help="Memory of each GPU, or of this machine, that models loaded on request may take; default: all.",
)
@click.option(
    "--use-busy-gpus",
    is_flag=True,
    envvar="DYNAPLAN_USE_BUSY_GPUS",
    help="Also use GPUs whose memory other programs use; without it they are left out.",
)
@click.option(
    "--namespace", envvar="DYN_NAMESPACE", default=None, help="Name of this deployment; default: dynamo."
)
@store_option
@compat_option
@api_key_option
@click.option(
    "--api-keys",
    metavar="FILE",
    expose_value=False,
    callback=lambda ctx, parameter, file: file and ctx.obj.append(f"--Frontend.api-keys={file}"),
    help="Ask for one of the keys of this file: see `dynaplan keys`.",
)
@click.option(
    "--power-cap",
    "power_caps",
    metavar="[HH:MM-HH:MM=]WATTS",
    multiple=True,
    callback=lambda ctx, parameter, caps: tuple(map(power_cap, caps)),
    help="The most that a GPU may draw: 250W, or 22:00-07:00=250W at hours of the day; repeatable.",
)
@click.option(
    "--power-saving-after",
    metavar="DURATION",
    expose_value=False,
    callback=lambda ctx, parameter, text: text and ctx.obj.append(f"--Common.power-saving-after={text}"),
    help="Stop models that nobody has asked for during it, such as 2h; they do not sleep.",
)
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    type=click.FloatRange(0.0),
    default=30.0,
    show_default=True,
    help="Seconds that requests may take to finish when everything ends.",
)
@click.option(
    "--leave-timeout",
    "leave_timeout_s",
    type=click.FloatRange(0.0),
    default=ProcessSettings.drain_deadline_s,
    show_default=True,
    help="Seconds that a worker may take to finish its requests when it leaves.",
)
@click.option(
    "--detach", is_flag=True, help="Return when it is ready, and leave it running; implies --exit-on-failure."
)
@click.option(
    "--exit-on-failure", is_flag=True, help="End with 78 when no worker of a service can ever start."
)
@click.option(
    "--supervise/--no-supervise",
    envvar="DYNAPLAN_SUPERVISE",
    default=True,
    show_default=True,
    help="Start serve again when it is killed; requests go on meanwhile.",
)
@click.option(
    "--orphan-grace",
    type=click.FloatRange(0.0),
    envvar="DYNAPLAN_ORPHAN_GRACE",
    default=120.0,
    show_default=True,
    help="Seconds that workers go on without serve, then they drain and end; 0 is --no-supervise.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    envvar=FORMAT_VARIABLE,
    expose_value=False,
    callback=lambda ctx, parameter, form: form and os.environ.update({FORMAT_VARIABLE: form}),
    help="Form of the lines in every log; json: one object a line.",
)
@click.option(
    "--on-event",
    envvar=ON_EVENT_VARIABLE,
    metavar="COMMAND|URL",
    expose_value=False,
    callback=lambda ctx, parameter, hook: hook and os.environ.update({ON_EVENT_VARIABLE: hook}),
    help="Tell it of events in JSON: failed, scaled, target_missed, model. A key belongs into the variable.",
)
@click.option("--circus-tcp", is_flag=True, help="circus on loopback TCP, without authentication.")
@token_file_option
@tls_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    graphs: tuple[str, ...],
    config_file: str | None,
    port: int | None,
    host: str | None,
    service_name: str,
    working_dir: Path | None,
    dry_run: bool,
    show_env: bool,
    namespace: str | None,
    api_key: str,
    detach: bool,
    supervise: bool,
    orphan_grace: float,
    **served: Any,
) -> int:
    """Run GRAPH (module:Class, module, or path.py:Class) until Ctrl-C.

    A model in its place, a .gguf file or a name, is served by itself: see `dynaplan pull`. Several models, or
    a YAML file with a section Models, are loaded on request.
    """
    # ``served`` are the options that ServeOptions has by the same names.
    started_in, link = Path.cwd(), None
    if supervise and orphan_grace and ctx.find_root().obj == OWN_PROCESS and not (dry_run or detach):
        link, code = run_under_supervisor(
            ctx.meta[ARGUMENTS], orphan_grace, served["drain_timeout_s"], namespace
        )
        if code is not None:
            return code
    with ended_by_sigint():
        graph, config_file = _graph_of(graphs, config_file, ctx)
        from dynaplan.cli.loading import find_config, load_deployment

        directory = _enter(working_dir or default_working_dir(graph))
        loaded, config, spec, warnings = load_deployment(
            graph,
            config_file,
            directory,
            namespace,
            ctx.obj,
            lambda: usable_gpus(served["gpus"]),
            service_name,
        )
        from dynaplan.fleet.serve import ServeOptions, serve

        frontend = config.get("Frontend", {})
        host, port = listen_address(host, port, frontend)
        warn(warnings + exposure_warnings(host, api_key, frontend))
        check_event_hook()
        memory = memory_lines(spec, config, served["gpus"], served["model_memory_bytes"])
    if dry_run:
        echo_dry_run(spec, config, served["gpus"], served["use_busy_gpus"], show_env, memory)
        return 0
    if detach:
        from dynaplan.cli.detach import serve_detached

        return serve_detached(ctx.meta[ARGUMENTS], started_in, spec.namespace)
    options = ServeOptions(
        host=host,
        port=port,
        api_key=api_key or None,
        config_file=find_config(config_file, directory, loaded),
        overrides=tuple(ctx.obj),
        **served,
    )
    return serve(spec, config, options, link)


def memory_size(text: str) -> int:
    """Return the bytes of an amount such as ``20GB``, 0 for empty text; raises BadParameter."""

    size = bytes_of(text) if text else 0
    if size is None or (text and not size):
        raise click.BadParameter(f"{text!r}: expected an amount such as 20GB.")
    if size and (meant := unit_missing(size)):
        raise click.BadParameter(f"{text!r}: {size} bytes? Write {meant}.")
    return size


def power_cap(text: str) -> str:
    """Return a cap on the power of GPUs as it was written; raises BadParameter for other text."""
    from dynaplan.contract.power_caps import parse_power_cap

    try:
        parse_power_cap(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None
    return text


def run_under_supervisor(
    arguments: Sequence[str], grace_s: float, drain_timeout_s: float, namespace: str | None
) -> tuple[SupervisorLink, int | None]:
    """Continue in a child process of a supervisor; return the link to it, and an exit code or None.

    The code is that of a deployment which this process, restarted after a crash, has adopted and served to
    its end. It is None on a first start, and when nothing could be adopted.
    """
    from dynaplan.cli.detach import PROGRAM
    from dynaplan.process.supervisor_link import fork_under_supervisor, inherited_link

    inherited = inherited_link(os.environ)
    if inherited is None:
        raise_descriptor_limit()  # the supervisor's children have its limit
    link = inherited or fork_under_supervisor([*PROGRAM, *arguments], grace_s, drain_timeout_s)
    click.get_current_context().call_on_close(link.close)
    link.arguments = arguments
    _use_fork_server(link, namespace)
    if inherited is None:
        return link, None
    with ended_by_sigint():
        from dynaplan.fleet.serve import serve_on
    return link, serve_on(link)


def _use_fork_server(link: SupervisorLink, namespace: str | None) -> None:
    """Start workers from the fork server from now on, unless the user has switched that off.

    It imports while this process prepares the rest. ``/proc/PID/environ`` shows for each worker what
    is given here: enough to see whose it is.
    """
    if os.environ.get(FORK_VARIABLE) == "0":
        return
    own = {"DYNAPLAN_PARENT_PID": str(link.supervisor_pid), "DYNAPLAN_WORKER_NAME": ""}
    if namespace:
        own["DYN_NAMESPACE"] = namespace
    free = ("DYN", "CUDA_", "ETCD_", "NATS_", "NOTIFY_SOCKET", "WATCHDOG_")
    link.have_fork_server("dynaplan.fleet.preloading", WORKER_PROGRAM, own, free)


def listen_address(host: str | None, port: int | None, frontend: Mapping[str, Any]) -> tuple[str, int]:
    """Return the address and the port to listen on: the option's, else the YAML's, else the default."""
    chosen = next(each for each in (port, frontend.get("port"), FrontendSettings.port) if each is not None)
    return host or str(frontend.get("host") or FrontendSettings.host), chosen


def _enter(directory: Path) -> Path:
    """Make relative paths in the environment absolute, change to the directory and return it.

    Raises GraphError when there is no such directory.
    """

    directory = directory.resolve()
    if not directory.is_dir():
        raise GraphError(f"--working-dir {directory}: no such directory", hint="Name an existing directory.")
    make_paths_absolute()
    os.chdir(directory)
    return directory


def usable_gpus(number: int | None) -> int:
    """Return how many GPUs a deployment may use; ``number`` is that of ``--gpus``, None for all."""
    from dynaplan.fleet.gpu_devices import available_gpus

    return len(available_gpus(number)[0])


def _graph_of(words: Sequence[str], config_file: str | None, ctx: click.Context) -> tuple[str, str | None]:
    """Return the graph and the file that these words mean: a graph, models, or a file of settings."""
    if len(words) == 1 and is_models_file(words[0]):
        if config_file:
            raise click.UsageError(
                f"{words[0]} is a file of settings, and -f names another. Leave one out.", ctx
            )
        return _graph_of_settings(words[0], ctx), words[0]
    if len(words) == 1 and is_model(words[0]):
        return _model_graph(words[0], config_file, ctx)
    if len(words) == 1:
        refuse_what_is_no_graph(words[0])
        return words[0], config_file
    if others := [word for word in words if not is_model(word)]:
        raise click.UsageError(
            f"no model: {', '.join(others)}. Serve one graph, or one model or several.", ctx
        )
    ctx.obj = [*models_overrides(words), *ctx.obj]
    return GRAPH_OF_MODELS, config_file


def _graph_of_settings(name: str, ctx: click.Context) -> str:
    """Return the graph of a file or directory of settings, and say which it is where it has no ``Models``."""
    from dynaplan.cli.graph_files import graph_of_file, has_models, shipped_file

    path = Path(os.path.expanduser(name))
    file = path if path.exists() else shipped_file(name) or path
    if has_models(file, ctx.obj):
        return GRAPH_OF_MODELS
    graph = graph_of_file(file)
    click.echo(f"{name} is the configuration of {graph}. This is: dynaplan serve {graph} -f {name}", err=True)
    return graph


def _model_graph(model: str, config_file: str | None, ctx: click.Context) -> tuple[str, str]:
    """Return the graph and configuration that serve a model by itself; adds its override to ``ctx.obj``."""
    config_file = config_file or file_for(model)
    click.echo(f"{model} is a model. This is: {serve_command(model, config_file)}", err=True)
    ctx.obj = [model_override(model), *ctx.obj]
    return GRAPH_OF_A_MODEL, config_file


def memory_lines(spec: GraphSpec, config: Sections, gpus: int | None, budget_bytes: int) -> list[str]:
    """Return a line for each service about its model's memory; warns, or raises ConfigError.

    ``budget_bytes`` is what models loaded on request may take of each device; 0 is all.
    """
    from dynaplan.cli.serve_checks import check_memory
    from dynaplan.fleet.gpu_devices import available_gpus

    lines, warnings = check_memory(spec, config, *available_gpus(gpus))
    if spec.on_demand:
        from dynaplan.cli.model_needs import check_never_loaded, chosen_places, model_needs

        needs = model_needs(spec, config, gpus, budget_bytes)
        lines += chosen_places(needs)
        warnings += check_never_loaded(needs)
    warn(warnings)
    return lines


def echo_dry_run(
    spec: GraphSpec,
    config: Sections,
    gpus: int | None,
    use_busy_gpus: bool,
    show_env: bool,
    memory: list[str],
) -> None:
    """Print the configuration, the models' memory, the workers and the GPUs.

    GPUs that others have at this moment are a warning: they may be free when it is served. Raises
    CapacityError for a graph that the box has too few GPUs for.
    """
    from dynaplan.fleet.gpu_inventory import gpu_map
    from dynaplan.graph.config import dry_run_text, environment_text

    parts = [dry_run_text(config), environment_text(config) if show_env else "", "\n".join(memory)]
    click.echo("\n\n".join(filter(None, parts)) + "\n")
    tables, fault = gpu_map(spec, config, gpus, use_busy_gpus)
    click.echo(tables)
    warn([f"it cannot start now: {fault}"] if fault else [])


def check_event_hook() -> None:
    """Raise ConfigError for a hook of ``--on-event`` that could not be called."""
    if hook := os.environ.get(ON_EVENT_VARIABLE):
        from dynaplan.fleet.event_hook import check_hook

        check_hook(hook)


def warn(warnings: Sequence[str]) -> None:
    """Print each warning, and each note among them, as a line of its own on standard error."""
    for warning in warnings:
        mark = "Note:" if isinstance(warning, screen.Note) else screen.warning("Warning:")
        click.echo(f"{mark} {warning}", err=True)


def exposure_warnings(host: str, api_key: str, frontend: Mapping[str, object]) -> list[str]:
    """Return a warning when others can reach the address and no key is asked for."""
    options = {kebab(each): value for each, value in frontend.items()}
    if api_key or options.get("api-key") or options.get("api-keys") or listens_on_loopback(host):
        return []
    return [
        f"--host {host} without an API key: whoever reaches this machine can use the service; "
        "set DYNAPLAN_API_KEY to ask for a key"
    ]


def default_working_dir(graph: str) -> Path:
    """Return GRAPH itself when it is a directory, else the current directory."""
    return Path(graph) if Path(graph).is_dir() else Path.cwd()
