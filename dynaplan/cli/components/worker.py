"""``dynaplan worker``: one engine worker in the foreground; only its user starts it again or ends it."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dynaplan.cli.components.flags import FLAGS, ComponentCommand, Flags, known_flags
from dynaplan.cli.components.shared_options import (
    advertise_host_option,
    advertise_port_option,
    config_file_option,
    tls_options,
    token_file_option,
)
from dynaplan.cli.deployment import store_option
from dynaplan.config import stock
from dynaplan.config.overrides import merge_sections
from dynaplan.config.settings.fields import options_of
from dynaplan.config.settings.frontend import DECODE_COMPONENT, PREFILL_COMPONENT, DisaggregationSettings
from dynaplan.config.settings.worker import (
    SIMULATED,
    EngineOptions,
    SimulationOptions,
    WorkerSettings,
    engine_of,
)

COMPONENTS = {"decode": DECODE_COMPONENT, "prefill": PREFILL_COMPONENT}
LISTED = options_of(WorkerSettings, EngineOptions, SimulationOptions, DisaggregationSettings)


@click.command(
    cls=ComponentCommand,
    name="worker",
    table=stock.WORKER,
    listed=LISTED,
    heading="Options of the worker (a real engine gets every other one as it is)",
)
@click.option("--namespace", envvar="DYN_NAMESPACE", default=None, help="The namespace to join.")
@store_option
@click.option(
    "--role",
    type=click.Choice(list(COMPONENTS)),
    default="decode",
    show_default=True,
    help="decode also prefills where no prefill worker does.",
)
@config_file_option
@click.option("--gpus", metavar="NUMBER", help="GPUs of this worker; 0.5 and the like share one.")
@click.option("--use-busy-gpus", is_flag=True, help="Also take a GPU whose memory other programs use.")
@token_file_option
@advertise_host_option
@advertise_port_option
@tls_options
@click.pass_context
def command(
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
    from dynaplan.cli.components.joining import TOKEN_VARIABLE, join
    from dynaplan.cli.components.running import (
        ComponentSockets,
        checked,
        config_for,
        refuse_another_model,
        run,
    )
    from dynaplan.config import certificates
    from dynaplan.worker.server import bind_advertised

    flags: Flags = ctx.meta[FLAGS]
    has_token = bool(token_file or os.environ.get(TOKEN_VARIABLE))
    address = bind_advertised(advertise_host, has_token=has_token, port=advertise_port)
    certificates.check(os.environ, address.host if address else "")
    joined = join(namespace, token_file)
    name = COMPONENTS[role]
    config = config_for(config_file, ctx.obj, joined)
    section = flags.known | flags.others
    if gpus is not None:
        section["ServiceArgs"] = {"resources": {"gpu": gpus}}
    if engine_of(merge_sections(config, {name: section}).get(name, {})) == SIMULATED:
        known_flags(ctx)
    component = checked(name, config, section, joined.namespace)
    refuse_another_model(component, joined)
    if role == "prefill":
        require_queue()
    return run(component, joined, ComponentSockets(address), uses_busy_gpus=use_busy_gpus)


def require_queue() -> None:
    """Raise ConfigError when no server is named for the prefill queue."""
    from dynaplan.util.errors import ConfigError

    if not os.environ.get("NATS_SERVER"):
        raise ConfigError(
            "no server for the prefill queue is named",
            hint="Set NATS_SERVER, or join a `dynaplan serve` whose graph has prefill workers.",
        )
