"""``dynaplan bench``: put load on a running deployment, and compare what is measured with the simulation."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.deployment import connect, namespace_option
from dynaplan.util import screen
from dynaplan.util.durations import seconds_of
from dynaplan.util.errors import ConfigError
from dynaplan.util.tables import folded

if TYPE_CHECKING:
    from dynaplan.cli.measuring.fleet_watch import FleetWatch
    from dynaplan.cli.measuring.foretelling import Foretelling
    from dynaplan.cli.measuring.running import Door, Measured, OfferedLoad
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.simulation.outcome import Slo
    from dynaplan.simulation.run import Result

EXIT_INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""

CLIENTS, FOR_S = 12, 60.0
"""The load that nothing is said of: clients, and the seconds in which they ask."""


def duration_s(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Read a duration such as ``60s``, ``10m`` or ``1h30m``; a bare number is seconds. BadParameter else."""
    if text is None:
        return None
    seconds = int(text) if text.isdecimal() else seconds_of(text)
    if not seconds:
        raise click.BadParameter(f"{text!r} is no duration. Write 60s, 10m or 1h30m.")
    return seconds


@click.command(name="bench")
@namespace_option
@click.option("--url", help="Measure the service at this base address, not a deployment of this box.")
@click.option(
    "--clients", type=click.IntRange(1), help=f"Clients that each ask again and again.  [default: {CLIENTS}]"
)
@click.option("--isl", type=click.IntRange(1), default=3000, show_default=True, help="Prompt, in tokens.")
@click.option("--osl", type=click.IntRange(1), default=150, show_default=True, help="Answer, in tokens.")
@click.option(
    "--for",
    "for_s",
    metavar="TIME",
    callback=duration_s,
    help="How long new requests are sent.  [default: 60s; with --trace, its length]",
)
@click.option(
    "--trace",
    help="Send a trace's requests at its times: a file, a directory or made-up load, as in `simulate`.",
)
@click.option("--rate-scale", default=1.0, show_default=True, help="Multiplies the trace's requests.")
@click.option("--seed", default=1, show_default=True, help="Of made-up load.")
@click.option("--model", default="", help="The model to ask for.  [default: the first that is served]")
@click.option("--ttft", default=None, type=float, help="Target in ms.  [default: the planner's, 500]")
@click.option("--itl", default=None, type=float, help="Target in ms.  [default: the planner's, 50]")
@click.option("--profile", default=None, help="Profile that times the simulation: a name or a path.")
@click.option("--api-key", envvar="DYNAPLAN_API_KEY", default="", help="Key to send; better as the variable.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the results there too.")
def command(namespace: str | None, url: str | None, json_path: str | None, **given: Any) -> int:
    """Put load on the running deployment, and show what its users would meet.

    Below it stands what `dynaplan simulate` foretells of the same deployment under the same load. Times are
    this client's: to the first token, and between tokens. Ctrl-C ends it with what there is.
    """
    from dynaplan.cli.measuring.comparison import notes, table
    from dynaplan.cli.simulate import check_writable, text_table, write

    if json_path:
        check_writable("--json", Path(json_path))
    load = _load(given)
    found = None if url else connect(namespace)
    planned, told = _foretelling(found, given)
    measured, fleet = _measured(_door(found, url, given), load, _slo(found, given), given["seed"], found)
    foretold, why = _foretold(planned, load, measured)
    compared = table(measured, fleet, foretold)
    asked = (given["isl"], given["osl"]) if load.clients else None
    lines = [*notes(measured, asked), *(why or told)]
    width = screen.width()
    click.echo("\n".join([text_table(compared, width), *(folded(line, width, "  ") for line in lines)]))
    if json_path:
        write("--json", json_path, json.dumps(compared, indent=2) + "\n")
    if measured.is_interrupted:
        return EXIT_INTERRUPTED
    return 0 if measured.tally.outcome.requests else 1


def _load(given: Mapping[str, Any]) -> OfferedLoad:
    """Return the load; raises ConfigError for two, and for a trace that cannot be read."""
    from dynaplan.cli.measuring.running import OfferedLoad
    from dynaplan.gateway.traced_requests import TracedRequest
    from dynaplan.planner import factory

    request = TracedRequest(0.0, given["isl"], given["osl"])
    if not given["trace"]:
        for_s = float(given["for_s"] or FOR_S)
        return OfferedLoad(given["clients"] or CLIENTS, request, partial(iter, ()), for_s)
    if given["clients"]:
        raise ConfigError("--clients and --trace are two loads", hint="Give only one of them.")
    trace = partial(factory.read_requests, given["trace"], given["rate_scale"], given["seed"])
    length_s = max((each.arrival_s for each in trace()), default=0.0) + 1e-6
    return OfferedLoad(0, request, trace, min(length_s, given["for_s"] or length_s))


def _foretelling(
    found: RunningDeployment | None, given: Mapping[str, Any]
) -> tuple[Foretelling | None, tuple[str, ...]]:
    """Return the simulation of the deployment as it is before the load, and its notes, or why there is
    none."""
    from dynaplan.cli.measuring.foretelling import foretelling

    if found is None:
        return None, ("nothing is foretold of a --url: its graph is not known here.",)
    try:
        planned = foretelling(found, given)
    except ConfigError as error:
        return None, (str(error),)
    return planned, planned.says


def _foretold(
    planned: Foretelling | None, load: OfferedLoad, measured: Measured
) -> tuple[Result | None, tuple[str, ...]]:
    """Return the simulation's result under the load as far as it was sent, or why there is none."""
    from dynaplan.simulation.run import ClosedLoop

    if planned is None or not measured.tally.sent:
        return None, ()
    try:
        if load.clients:
            lengths = load.request.prompt_tokens, load.request.output_tokens
            return planned.result(ClosedLoop(load.clients, *lengths, measured.sending_s)), ()
        return planned.result(lambda: load.requests(measured.sending_s)), ()
    except ConfigError as error:
        return None, (f"nothing is foretold: {error}",)


def _slo(found: RunningDeployment | None, given: Mapping[str, Any]) -> Slo:
    """Return the targets of the command line, or else of the deployment's planner, or the defaults."""
    from dynaplan.cli.scaling.afterwards import planner_settings
    from dynaplan.cli.simulate import target_ms
    from dynaplan.simulation.outcome import Slo

    settings = planner_settings(found) if found else None
    stated = settings.to_options() if settings else {}
    return Slo(*(target_ms(name, given, stated) for name in ("ttft", "itl")))


def _door(found: RunningDeployment | None, url: str | None, given: Mapping[str, Any]) -> Door:
    """Return the way in; a deployment of this box brings its own key."""
    from dynaplan.cli.measuring.running import Door
    from dynaplan.config import certificates
    from dynaplan.util.tls.client import trusted

    address = (url or (found.frontend_url if found else "")).rstrip("/").removesuffix("/v1")
    tls = trusted(address, certificates.authorities(os.environ))
    key = given["api_key"] or ("" if url else os.environ.get("DYNAPLAN_API_KEY", ""))
    return Door(address, key, tls, given["model"], is_text=found is not None and _is_simulated(found))


def _is_simulated(found: RunningDeployment) -> bool:
    from dynaplan.cli.measuring.foretelling import graph_of
    from dynaplan.config.settings.routing import DECODE_COMPONENT
    from dynaplan.config.settings.worker import SIMULATED, engine_of

    return engine_of(graph_of(found).sections[DECODE_COMPONENT]) == SIMULATED


def _measured(
    door: Door, load: OfferedLoad, slo: Slo, seed: int, found: RunningDeployment | None
) -> tuple[Measured, FleetWatch | None]:
    import uvloop

    from dynaplan.cli.measuring.fleet_watch import FleetWatch
    from dynaplan.cli.measuring.running import measure

    fleet = FleetWatch(found, time.perf_counter()) if found else None
    return uvloop.run(measure(door, load, slo, seed, fleet)), fleet
