"""Commands that run one component alone: ``frontend``, ``worker``, ``planner``, ``orchestrate``.

Each joins a namespace, runs in the foreground, and is ended or restarted by its user alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.options import (
    api_key_option,
    config_file_option,
    join_option,
    namespace_argument,
    reachable_options,
    store_option,
    token_file_option,
)
from dynaplan.cli.running_deployment import find_store
from dynaplan.cli.service_options import FLAGS, ComponentCommand, Flags, known_flags
from dynaplan.config import stock
from dynaplan.config.overrides import merge_sections, sections_of
from dynaplan.config.settings.fields import options_of
from dynaplan.config.settings.frontend import (
    DECODE_COMPONENT,
    PREFILL_COMPONENT,
    DisaggregationSettings,
    FrontendSettings,
)
from dynaplan.config.settings.planner import KUBERNETES, PlannerSettings
from dynaplan.config.settings.worker import (
    SIMULATED,
    EngineOptions,
    SimulationOptions,
    WorkerSettings,
    engine_of,
)
from dynaplan.planner.virtual.orchestrator import Orchestrator
from dynaplan.process.logfile import configure_logging
from dynaplan.process.signals import on_signals
from dynaplan.runtime import connect
from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment

log = logging.getLogger("dynaplan.orchestrate")

FRONTEND = "Frontend"
FRONTEND_OWN = frozenset({"host", "port", "api-key"})
"""Options that are the command's own."""

FRONTEND_TABLE = {**stock.PROCESSOR, **stock.ROUTER, **stock.FRONTEND}
FRONTEND_FLAGS = {
    name: each for name, each in stock.FRONTEND.items() if name not in FRONTEND_OWN and each.has_effect
}


@click.command(
    cls=ComponentCommand,
    name="frontend",
    table={name: each for name, each in FRONTEND_TABLE.items() if name not in FRONTEND_OWN},
    listed=FRONTEND_FLAGS,
    heading="Options of the frontend",
    aliases={"router-mode": "router", "router-ttl-secs": "router-ttl"},
)
@join_option
@store_option
@config_file_option()
@click.option(
    "-p", "--port", type=click.IntRange(0, 65535), help=f"Default: {FrontendSettings.port}, or the file's."
)
@click.option("--host", help=f"Default: {FrontendSettings.host}, or the file's.")
@click.option("--share-port", is_flag=True, help="Share the port with frontends of this user that do so too.")
@api_key_option
@reachable_options
@click.pass_context
def frontend(
    ctx: click.Context,
    namespace: str | None,
    config_file: str | None,
    port: int | None,
    host: str | None,
    share_port: bool,
    api_key: str,
    token_file: Path | None,
    advertise_host: str | None,
    advertise_port: int,
) -> int:
    """Run one frontend in the foreground, for the workers of a namespace.

    It joins the `dynaplan serve` of that namespace that runs here, with its configuration, unless a store is
    named: ETCD_ENDPOINTS, or --store with NATS_SERVER or DYN_FILE_KV. Restarted it finds its workers again,
    whose models stay loaded.
    """
    from dynaplan.cli.component import (
        ComponentSockets,
        advertised_address,
        check_component,
        config_for,
        held_port,
        run,
    )
    from dynaplan.cli.join import join
    from dynaplan.cli.serve import exposure_warnings, listen_address, warn

    flags = known_flags(ctx)
    address = advertised_address(advertise_host, advertise_port, token_file)
    joined = join(namespace, token_file)
    config = config_for(config_file, ctx.obj, joined)
    component = check_component(FRONTEND, config, flags, joined.namespace)
    section = component.config.get(FRONTEND, {})
    host, port = listen_address(host, port, section)
    warn(exposure_warnings(host, api_key, section))
    with held_port(host, port, share_port) as held:
        return run(component, joined, ComponentSockets(address, held, host))


COMPONENT_OF_ROLE = {"decode": DECODE_COMPONENT, "prefill": PREFILL_COMPONENT}
WORKER_FLAGS = {
    name: each
    for name, each in options_of(
        WorkerSettings, EngineOptions, SimulationOptions, DisaggregationSettings
    ).items()
    if each.has_effect
}


@click.command(
    cls=ComponentCommand,
    name="worker",
    table=stock.WORKER,
    listed=WORKER_FLAGS,
    heading="Options of the worker (a real engine gets every other one as it is)",
)
@join_option
@store_option
@click.option(
    "--role",
    type=click.Choice(list(COMPONENT_OF_ROLE)),
    default="decode",
    show_default=True,
    help="decode also prefills where no prefill worker does.",
)
@config_file_option()
@click.option("--gpus", metavar="NUMBER", help="GPUs of this worker; 0.5 and the like share one.")
@click.option("--use-busy-gpus", is_flag=True, help="Also take a GPU whose memory other programs use.")
@reachable_options
@click.pass_context
def worker(
    ctx: click.Context,
    namespace: str | None,
    role: str,
    config_file: str | None,
    gpus: str | None,
    use_busy_gpus: bool,
    token_file: Path | None,
    advertise_host: str | None,
    advertise_port: int,
) -> int:
    """Run one worker in the foreground and join a namespace: frontends send it requests.

    It joins the `dynaplan serve` of that namespace that runs here, with its configuration, unless a store is
    named: ETCD_ENDPOINTS, or --store with NATS_SERVER or DYN_FILE_KV. A serve lets it be: it neither counts
    it as one of its own nor ends it.
    """
    from dynaplan.cli.component import (
        ComponentSockets,
        advertised_address,
        check_component,
        config_for,
        refuse_another_model,
        run,
    )
    from dynaplan.cli.join import join

    flags: Flags = ctx.meta[FLAGS]
    address = advertised_address(advertise_host, advertise_port, token_file)
    joined = join(namespace, token_file)
    name = COMPONENT_OF_ROLE[role]
    config = config_for(config_file, ctx.obj, joined)
    section = flags.known | flags.others
    if gpus is not None:
        section["ServiceArgs"] = {"resources": {"gpu": gpus}}
    if engine_of(merge_sections(config, {name: section}).get(name, {})) == SIMULATED:
        known_flags(ctx)
    component = check_component(name, config, section, joined.namespace)
    refuse_another_model(component, joined)
    if role == "prefill":
        require_queue()
    return run(component, joined, ComponentSockets(address), uses_busy_gpus=use_busy_gpus)


def require_queue() -> None:
    """Raise ConfigError when NATS_SERVER names no server for the prefill queue."""

    if not os.environ.get("NATS_SERVER"):
        raise ConfigError(
            "no server for the prefill queue is named",
            hint="Set NATS_SERVER, or join a `dynaplan serve` whose graph has prefill workers.",
        )


@click.command(
    cls=ComponentCommand,
    name="planner",
    table=stock.PLANNER,
    listed={name: each for name, each in stock.PLANNER.items() if each.has_effect},
    heading="Options of the planner",
)
@store_option
@click.pass_context
def planner(ctx: click.Context) -> None:
    """Plan for a deployment: the one whose store ETCD_ENDPOINTS names, or the one that runs here.

    With --store nats or file, NATS_SERVER or DYN_FILE_KV names the store. With --environment kubernetes it
    plans for a cluster, with the credentials of its pod or of KUBECONFIG.
    """
    from dynaplan.planner.assembly import run_planner

    section = sections_of(ctx.obj, ["Planner"])["Planner"]
    settings = PlannerSettings.from_options({**section, **known_flags(ctx)})
    if settings.environment != KUBERNETES and (found := find_store(settings.namespace)):
        os.environ.setdefault("DYNAPLAN_LOG_DIR", str(found.log_dir))
    configure_logging()
    asyncio.run(_run_until_signal(run_planner(settings)))


async def _run_until_signal(planning: Any) -> None:
    task = asyncio.ensure_future(planning)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        click.echo("stopped")


@click.command(name="orchestrate")
@namespace_argument
@store_option
@token_file_option
@click.option(
    "--exec",
    "shell_command",
    required=True,
    metavar="COMMAND",
    help="Run in a shell for each decision: NUM_PREFILL_WORKERS, NUM_DECODE_WORKERS, DECISION_ID are set.",
)
@click.option("--once", is_flag=True, help="End after the first decision that is carried out.")
def orchestrate(namespace: str | None, token_file: Path | None, shell_command: str, once: bool) -> None:
    """Carry out the decisions of a planner with `environment: virtual`.

    A decision is acknowledged when the command exits with 0; until then the planner makes no other. A command
    that fails is run again. It should ask for the numbers, not for a difference: it may run twice for one.

    \b
    dynaplan planner --namespace box --environment virtual --policy load &
    dynaplan orchestrate --namespace box \\
      --exec 'kubectl scale deploy/decode --replicas=$NUM_DECODE_WORKERS'
    """
    from dynaplan.cli.join import join

    environment = dict(os.environ)  # as it is before joining, which adds the deployment's secrets
    joined = join(namespace, token_file)
    if joined.deployment:
        check_carried_out_here(joined.deployment)
    configure_logging()
    asyncio.run(_orchestrate(joined.namespace, shell_command, environment, once))


def check_carried_out_here(found: RunningDeployment) -> None:
    """Raise ConfigError when the deployment's own ``serve`` carries out its planner's decisions."""
    from dynaplan.cli.scale_counts import planner_settings

    settings = planner_settings(found)
    if settings is None or settings.is_carried_out_elsewhere:
        return
    raise ConfigError(
        f"the planner of {found.namespace} has environment: {settings.environment}: `dynaplan serve` (pid "
        f"{found.arbiter.pid}) carries its decisions out, and leaves none to a command of yours",
        hint="Serve it with --Planner.environment=virtual, or have `dynaplan serve --on-event` call you.",
    )


async def _orchestrate(namespace: str, command: str, environment: dict[str, str], once: bool) -> None:
    from dynaplan.planner.virtual.client import VirtualConnectorClient

    async with connect(namespace) as runtime:
        orchestrator = Orchestrator(VirtualConnectorClient(runtime), command, environment)
        log.info("waiting for a decision of the planner of %s", namespace)
        work = asyncio.ensure_future(orchestrator.carry_out_next() if once else orchestrator.run())

        def leave(name: str) -> None:
            click.echo(f"{name}: ending the command that runs")
            work.cancel()

        with on_signals(leave):
            try:
                await work
            except asyncio.CancelledError:
                click.echo("stopped")
