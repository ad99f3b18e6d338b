"""``dynaplan frontend``: one frontend in the foreground; restarted, it finds every worker again."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dynaplan.cli.components.flags import ComponentCommand, known_flags
from dynaplan.cli.components.shared_options import (
    advertise_host_option,
    advertise_port_option,
    config_file_option,
    tls_options,
    token_file_option,
)
from dynaplan.cli.deployment import store_option
from dynaplan.config import stock
from dynaplan.config.settings.frontend import FrontendSettings

FRONTEND = "Frontend"
OWN = frozenset({"host", "port", "api-key"})
"""Options that are the command's own."""

TABLE = {**stock.PROCESSOR, **stock.ROUTER, **stock.FRONTEND}
LISTED = {name: each for name, each in stock.FRONTEND.items() if name not in OWN and each.about}


@click.command(
    cls=ComponentCommand,
    name="frontend",
    table={name: each for name, each in TABLE.items() if name not in OWN},
    listed=LISTED,
    heading="Options of the frontend",
    aliases={"router-mode": "router", "router-ttl-secs": "router-ttl"},
)
@click.option("--namespace", envvar="DYN_NAMESPACE", default=None, help="The namespace to join.")
@store_option
@config_file_option
@click.option(
    "-p", "--port", type=click.IntRange(0, 65535), help=f"Default: {FrontendSettings.port}, or the file's."
)
@click.option("--host", help=f"Default: {FrontendSettings.host}, or the file's.")
@click.option("--share-port", is_flag=True, help="Share the port with frontends of this user that do so too.")
@click.option(
    "--api-key", envvar="DYNAPLAN_API_KEY", default="", help="Ask for this key; better as the variable."
)
@token_file_option
@advertise_host_option
@advertise_port_option
@tls_options
@click.pass_context
def command(
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
    from dynaplan.cli.components.joining import TOKEN_VARIABLE, join
    from dynaplan.cli.components.running import ComponentSockets, checked, config_for, held_port, run
    from dynaplan.cli.starting.serve import exposed, warn
    from dynaplan.config import certificates
    from dynaplan.worker.server import bind_advertised

    flags = known_flags(ctx)
    has_token = bool(token_file or os.environ.get(TOKEN_VARIABLE))
    address = bind_advertised(advertise_host, has_token=has_token, port=advertise_port)
    certificates.check(os.environ, address.host if address else "")
    joined = join(namespace, token_file)
    config = config_for(config_file, ctx.obj, joined)
    component = checked(FRONTEND, config, flags, joined.namespace)
    section = component.config.get(FRONTEND, {})
    host = host or str(section.get("host") or FrontendSettings.host)
    port = next(each for each in (port, section.get("port"), FrontendSettings.port) if each is not None)
    warn(exposed(host, api_key, section))
    with held_port(host, port, share_port) as held:
        return run(component, joined, ComponentSockets(address, held, host))
