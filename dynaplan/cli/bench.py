"""``dynaplan bench``: put load on a running deployment, and compare what is measured with the simulation.

``bench_measurement.py`` measures; what the simulation predicts of the same deployment under the same load
stands below it.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from dynaplan.cli.main import EXIT_INTERRUPTED
from dynaplan.cli.options import namespace_argument
from dynaplan.cli.running_deployment import connect, service_config
from dynaplan.cli.scale_counts import free_gpus, planner_settings, statefile_holds
from dynaplan.cli.simulate import (
    check_writable,
    dispatched,
    origins,
    simulation_of,
    target_ms,
    text_table,
    write,
)
from dynaplan.cli.timing import STATUS_STORE_TIMEOUT_S
from dynaplan.config.settings.frontend import DECODE_COMPONENT, PREFILL_COMPONENT
from dynaplan.config.settings.worker import SIMULATED, engine_of
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.fleet.rules.statefile import inventory_of
from dynaplan.graph.lifecycle import COUNTS, HOLDS_GPUS, Role
from dynaplan.lab.simulate.options import SECTIONS, SimulatedGraph
from dynaplan.simulation.outcome import Slo
from dynaplan.simulation.run import ClosedLoop, Result
from dynaplan.util import screen
from dynaplan.util.amounts import seconds_of
from dynaplan.util.errors import ConfigError, TemporaryError
from dynaplan.util.tables import fold

if TYPE_CHECKING:
    from dynaplan.cli.bench_measurement import BenchTarget, FleetMonitor, Measurement, OfferedLoad
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.lab.simulate.options import SimulateOptions
    from dynaplan.lab.simulate.policy_runs import Trace

CLIENTS, FOR_S = 12, 60.0
"""The default load: clients, and the seconds in which they send."""

MEASURED_ROW, SIMULATED_ROW = "measured", "simulated"
"""The names of the two rows, in the first column."""

MAX_CLIENT_LOAD = 0.7
"""The part of a core above which this client may read tokens late."""

MAX_LATE_S = 0.02
"""Seconds by which a request may be sent after it was due before that is reported."""


def duration_s(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Return the seconds of ``60s``, ``10m``, ``1h30m`` or a bare number; BadParameter for other text."""
    if text is None:
        return None
    seconds = int(text) if text.isdecimal() else seconds_of(text)
    if not seconds:
        raise click.BadParameter(f"{text!r} is no duration. Write 60s, 10m or 1h30m.")
    return seconds


@click.command(name="bench")
@namespace_argument
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
@click.option(
    "--api-key",
    envvar="DYNAPLAN_API_KEY",
    default="",
    help="Key to send; better as the variable DYNAPLAN_API_KEY.",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the results there too.")
def command(namespace: str | None, url: str | None, json_path: str | None, **given: Any) -> int:
    """Put load on the running deployment, and show what its users would meet.

    Below it stands what `dynaplan simulate` predicts of the same deployment under the same load. Times are
    this client's: to the first token, and between tokens. Ctrl-C ends it with what there is.
    """

    if json_path:
        check_writable("--json", Path(json_path))
    if url:
        check_url(url)
    load = _load(given)
    found = None if url else connect(namespace)
    prediction, reasons = _predict(found, given)
    measured, fleet = _measure(_service(found, url, given), load, _slo(found, given), given["seed"], found)
    predicted, why = _simulate(prediction, load, measured)
    compared = table(measured, fleet, predicted)
    asked = (given["isl"], given["osl"]) if load.clients else None
    lines = [*notes(measured, asked), *(why or reasons)]
    width = screen.width()
    click.echo("\n".join([text_table(compared, width), *(fold(line, width, "  ") for line in lines)]))
    if json_path:
        write("--json", json_path, json.dumps(compared, indent=2) + "\n")
    if measured.is_interrupted:
        return EXIT_INTERRUPTED
    return 0 if measured.counters.outcome.requests else 1


def check_url(url: str) -> None:
    """Raise ConfigError unless ``url`` is the address of a web server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        hint = "Write http://HOST:PORT." if "://" in url else f"Write http://{url}."
        raise ConfigError(f"--url {url} is no address of a service", hint=hint)


def _load(given: Mapping[str, Any]) -> OfferedLoad:
    """Return the load to send; ConfigError for both --clients and --trace, and for an unreadable trace."""
    from dynaplan.cli.bench_measurement import OfferedLoad
    from dynaplan.simulation.traces.reading import read_requests

    request = TracedRequest(0.0, given["isl"], given["osl"])
    if not given["trace"]:
        for_s = float(given["for_s"] or FOR_S)
        return OfferedLoad(given["clients"] or CLIENTS, request, partial(iter, ()), for_s)
    if given["clients"]:
        raise ConfigError("--clients and --trace are two loads", hint="Give only one of them.")
    trace = partial(read_requests, given["trace"], given["rate_scale"], given["seed"])
    length_s = max((each.arrival_s for each in trace()), default=0.0) + 1e-6
    return OfferedLoad(0, request, trace, min(length_s, given["for_s"] or length_s))


def _predict(
    found: RunningDeployment | None, given: Mapping[str, Any]
) -> tuple[DeploymentSimulation | None, tuple[str, ...]]:
    """Return the simulation of the deployment as it is before the load, and its notes, or why there is
    none.
    """

    if found is None:
        return None, ("nothing is predicted of a --url: its graph is not known here.",)
    try:
        prediction = predict(found, given, asyncio.run(_read_free_gpus(found)))
    except ConfigError as error:
        return None, (str(error),)
    return prediction, prediction.notes


def _simulate(
    prediction: DeploymentSimulation | None, load: OfferedLoad, measured: Measurement
) -> tuple[Result | None, tuple[str, ...]]:
    """Return the simulation's result under the load as far as it was sent, or why there is none."""

    if prediction is None or not measured.counters.requests_sent:
        return None, ()
    try:
        if load.clients:
            lengths = load.request.prompt_tokens, load.request.output_tokens
            return prediction.result(ClosedLoop(load.clients, *lengths, measured.sending_s)), ()
        return prediction.result(lambda: load.requests(measured.sending_s)), ()
    except ConfigError as error:
        return None, (f"nothing is predicted: {error}",)


def _slo(found: RunningDeployment | None, given: Mapping[str, Any]) -> Slo:
    """Return the targets of the command line, or else of the deployment's planner, or the defaults."""

    settings = planner_settings(found) if found else None
    stated = settings.to_options() if settings else {}
    return Slo(*(target_ms(name, given, stated) for name in ("ttft", "itl")))


def _service(found: RunningDeployment | None, url: str | None, given: Mapping[str, Any]) -> BenchTarget:
    """Return what to measure; a deployment of this box brings its own key."""
    from dynaplan.cli.bench_measurement import BenchTarget
    from dynaplan.config import certificates
    from dynaplan.http.tls import trusted

    address = (url or (found.frontend_url if found else "")).rstrip("/").removesuffix("/v1")
    tls = trusted(address, certificates.authorities(os.environ))
    is_text = found is not None and engine_of(graph_of(found).sections[DECODE_COMPONENT]) == SIMULATED
    key = given["api_key"] or ("" if url else os.environ.get("DYNAPLAN_API_KEY", ""))
    return BenchTarget(address, key, tls, given["model"], is_text=is_text)


def _measure(
    service: BenchTarget, load: OfferedLoad, slo: Slo, seed: int, found: RunningDeployment | None
) -> tuple[Measurement, FleetMonitor | None]:
    import uvloop

    from dynaplan.cli.bench_measurement import FleetMonitor, measure

    fleet = FleetMonitor(found, time.perf_counter()) if found else None
    return uvloop.run(measure(service, load, slo, seed, fleet)), fleet


def table(
    measured: Measurement, fleet: FleetMonitor | None, predicted: Result | None
) -> list[dict[str, Any]]:
    """Return the measured row and the simulated one; None for what cannot be seen from outside."""
    from dynaplan.lab.simulate.table import rows

    counters = measured.counters
    changes = fleet.changes() if fleet else None
    result = Result(
        MEASURED_ROW,
        counters.outcome,
        fleet.gpu_s / 3600 if fleet else 0.0,
        measured.sending_s,
        measured.sending_s,
        changes.scale_events if changes else 0,
        changes.flaps if changes else 0,
    )
    first, *others = rows([result, predicted] if predicted else [result])
    unseen = ["queued_p95_ms", "imbalance", *([] if fleet else ["gpu_hours", "scale_events", "flaps"])]
    first |= dict.fromkeys(unseen) | {"model": measured.model, **counters.document()}
    # A decode worker counts what a prefill worker has handed over as cached: that is no hit.
    if fleet is None or fleet.is_disaggregated or not counters.outcome.cached_tokens:
        first["hit_rate"] = None
    return [
        first,
        *({**each, "policy": SIMULATED_ROW, "simulated_policy": each["policy"]} for each in others),
    ]


def notes(measured: Measurement, asked: tuple[int, int] | None) -> Iterator[str]:
    """Yield a sentence for each thing that a reader of the table must know.

    ``asked`` are the tokens of each prompt and answer, None for a trace.
    """
    counters = measured.counters
    for kind, number in counters.failures.most_common():
        yield f"failed: {number} x {kind}: {counters.examples[kind]}"
    if counters.open:
        yield f"{len(counters.open)} requests were open when it was ended, and are not counted."
    if counters.answers_of_other_length:
        other = counters.answers_of_other_length
        yield (
            f"{other} answers had another number of tokens than was asked for: this engine "
            "does not heed ignore_eos, so that they compare badly with the simulation."
        )
    if counters.prompts_of_other_length and asked:
        other = counters.prompts_of_other_length
        yield f"{other} prompts count as another number of tokens than {asked[0]} there."
    if measured.client_load > MAX_CLIENT_LOAD:
        yield (
            f"This client took {measured.client_load:.0%} of a core: its times may be longer than they were. "
            "Send less, or measure from several clients."
        )
    if counters.max_late_s > MAX_LATE_S:
        yield (
            f"A request was sent {counters.max_late_s * 1000:.0f} ms after it was due; its latency counts "
            "from when it was due."
        )


STATIC = "static"


@dataclass(frozen=True)
class DeploymentSimulation:
    """The simulation that stands for a deployment; ``notes`` are sentences on what it is based on."""

    options: SimulateOptions
    notes: tuple[str, ...]

    def result(self, load: Trace | ClosedLoop) -> Result:
        from dynaplan.lab.simulate.policy_runs import run_load

        (result,) = run_load(self.options, load)
        return result


def predict(
    found: RunningDeployment, given: Mapping[str, Any], free: int | None = None
) -> DeploymentSimulation:
    """Return the simulation of the deployment as it is now: same graph, profile, policy and workers.

    ``given`` are the options ``ttft``, ``itl``, ``seed`` and ``profile``; ``free`` is the number of GPUs that
    further workers may get, where it is known. Raises ConfigError when there is nothing to simulate it by.
    """
    graph = graph_of(found)
    profile = given["profile"] or _profile(graph)
    prefill, decode = _present(found, Role.PREFILL), _present(found, Role.DECODE)
    is_disaggregated = any(worker.role is Role.PREFILL for worker in found.workers)
    start = f"{prefill},{decode}" if is_disaggregated else str(decode)
    policy, gpus = _policy(found), _gpus(found, free)
    options = simulation_of(
        [policy if policy != STATIC else f"{STATIC}:{start}"],
        {
            **{name: given[name] for name in ("ttft", "itl", "seed")},
            "trace": "",
            "rate_scale": 1.0,
            "profile": profile,
            "gpus": gpus,
            "mode": "disagg" if is_disaggregated else "agg",
            "startup_time": _startup_s(found),
            "start": start,
            "router": None,
            "kv_events": None,
        },
        graph,
    )
    workers = f"{decode} worker{'' if decode == 1 else 's'}"
    if is_disaggregated:
        workers = f"{prefill} prefill and {decode} decode workers"
    by = "no planner" if policy == STATIC else f"policy {policy}"
    first = f"simulated with {workers} at the beginning, {by}."
    if (all_gpus := len(inventory_of(found.document))) > gpus:
        first += f" Others have {all_gpus - gpus} of its {all_gpus} GPUs: left out."
    return DeploymentSimulation(options, (first, *origins(options), *dispatched(options)))


def graph_of(found: RunningDeployment) -> SimulatedGraph:
    """Return the deployment's merged configuration, its services under the names of the shipped graphs."""
    from dynaplan.config.service_config import (
        SERVICE_ARGS,
        kebab_keys,
        section_options,
    )

    config = service_config(found)
    named = {name: name for name in SECTIONS}
    stock = {Role.PLANNER: "Planner", Role.DECODE: DECODE_COMPONENT, Role.PREFILL: PREFILL_COMPONENT}
    named |= {stock[worker.role]: worker.component for worker in found.workers if worker.role in stock}
    return SimulatedGraph(
        {name: section_options(config, own) for name, own in named.items()},
        {name: kebab_keys(config.get(own) or {}).get(SERVICE_ARGS) or {} for name, own in named.items()},
        is_served=True,
    )


def _profile(graph: SimulatedGraph) -> str | None:
    """Return the profile directory of a real engine, None for a simulated one; ConfigError without any."""
    engine = engine_of(graph.sections[DECODE_COMPONENT])
    if engine == SIMULATED:
        return None
    measured = graph.sections["Planner"].get("profile-results-dir")
    if not measured:
        raise ConfigError(
            f"nothing is predicted: there is no profile of this {engine}",
            hint="`dynaplan profile-sla` measures one; --profile names it.",
        )
    return str(measured)


def _policy(found: RunningDeployment) -> str:
    """Return the policy of the deployment's planner; static without one, or while a role is held."""
    settings = planner_settings(found)
    return settings.policy if settings and not statefile_holds(found.document).by_role else STATIC


def _present(found: RunningDeployment, role: Role) -> int:
    return sum(worker.role is role and worker.state in COUNTS for worker in found.workers)


async def _read_free_gpus(found: RunningDeployment) -> int | None:
    """Return the number of GPUs that further workers may get, None where the store does not say."""
    from dynaplan.store import connections

    try:
        async with connections.open_store() as store, asyncio.timeout(STATUS_STORE_TIMEOUT_S):
            return await free_gpus(store, found.namespace)
    except (TemporaryError, TimeoutError):
        return None


def _gpus(found: RunningDeployment, free: int | None) -> int:
    """Return the number of GPUs that the planner may use: those of its engines and the ``free`` ones.

    Without ``free`` all of the box. At least one for each worker, though several may share a GPU.
    """
    workers = [worker for worker in found.workers if worker.role in (Role.PREFILL, Role.DECODE)]
    held = {index for each in workers if each.state in HOLDS_GPUS for index in each.gpus}
    usable = len(inventory_of(found.document)) if free is None else len(held) + free
    return max(usable, sum(max(1, len(each.gpus)) for each in workers))


def _startup_s(found: RunningDeployment) -> float | None:
    """Return the longest usual start-up time of an engine in seconds; None when none was measured."""
    from dynaplan.cli.status_document import usual_start_s

    engines = {each.name for each in found.workers if each.role in (Role.PREFILL, Role.DECODE)}
    known = [taken for name, taken in usual_start_s(found).items() if name in engines and taken is not None]
    return max(known, default=None)
