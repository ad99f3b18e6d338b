"""``dynaplan simulate``: runs policies on a trace, in virtual time, and compares them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.options import config_file_option
from dynaplan.cli.service_options import ServiceOptionsCommand
from dynaplan.config.model_entries import planned_models
from dynaplan.config.settings.frontend import DECODE_COMPONENT, PREFILL_COMPONENT
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.config.settings.worker import SimOptions
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.engines.sim.profiles import profile_origin
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.options import SimulatedGraph, SimulateOptions, read_graph
from dynaplan.lab.simulate.table import COLUMNS, OPTIONAL_COLUMNS, columns_of, notes, rows
from dynaplan.models.model import NO_CONSTRAINTS
from dynaplan.simulation.best_static import BEST_STATIC
from dynaplan.simulation.outcome import Slo
from dynaplan.util import screen, tables
from dynaplan.util.durations import clock
from dynaplan.util.errors import ConfigError, all_faults
from dynaplan.util.progress import ProgressLine, left_words, time_left_s
from dynaplan.util.tables import fold

if TYPE_CHECKING:
    from dynaplan.models.model import Constraints
    from dynaplan.simulation.many_models.box import SimulatedModel


NO_TRACE = """Missing option '--trace', the load. For example:
  dynaplan simulate --trace sinusoid:low=5,high=20,period=150 -f disagg.yaml"""


def _given_trace(context: click.Context, parameter: click.Parameter, text: str | None) -> str:
    if text is None:
        raise click.UsageError(NO_TRACE, context)
    return text


@click.command(
    cls=ServiceOptionsCommand,
    name="simulate",
    epilog="Any option of the graph's sections: --Planner.key=value, --VllmWorker.key=value",
)
@click.option(
    "--trace",
    callback=_given_trace,
    help="A trace file, a directory of them, or made-up load: sinusoid:low=5,high=20,period=150, bursts",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help="load, sla, both, formula, static:P,D, best-static (tries splits that stand still), or "
    "MODULE:FUNCTION, a policy of your own  "
    "[default: the graph's, load]",
)
@config_file_option(
    "Graph's YAML, looked up here, then among the shipped graphs: simulates the deployment that "
    "`dynaplan serve` makes of it"
)
@click.option(
    "--profile",
    default=None,
    help="Profile that times the engines: a name, a path, or learnt[:NAME] of `dynaplan profiles`",
)
@click.option("--gpus", default=8, show_default=True, type=click.IntRange(1))
@click.option(
    "--mode",
    type=click.Choice(["disagg", "agg"]),
    help="With prefill workers or without  [default: the graph's, disagg]",
)
@click.option(
    "--startup-time",
    default=None,
    type=click.FloatRange(0),
    help="Seconds from a worker's start to ready  [default: the graph's, 60]",
)
@click.option("--rate-scale", default=1.0, show_default=True, help="Multiplies the trace's requests")
@click.option(
    "--last",
    default=None,
    type=click.FloatRange(0, min_open=True),
    help="Seconds: only the arrivals at the end of the trace  [default: all]",
)
@click.option("--ttft", default=None, type=float, help="Target in ms  [default: the planner's, 500]")
@click.option("--itl", default=None, type=float, help="Target in ms  [default: the planner's, 50]")
@click.option(
    "--start",
    default=None,
    help="Workers to begin with: P,D, or N with --mode agg  [default: the graph's, 1]",
)
@click.option("--router", default=None, help="How a worker is chosen  [default: the graph's, round-robin]")
@click.option(
    "--kv-events/--no-kv-events",
    default=None,
    help="What router kv goes by: the blocks that engines tell of, or prediction  [default: the graph's, on]",
)
@click.option("--seed", default=1, show_default=True, help="Of made-up load and of the router's choices")
@click.option(
    "--recommend",
    is_flag=True,
    help="Try the planner's policies and the best static split, and say which would have done better",
)
@click.option(
    "--models",
    default=None,
    help="Several models, by their GB: 20,13,e5=1@3 (NAME=GB@SECONDS of a load); --trace is then popularity, "
    "groups, agents or a trace with models, and other systems' rules are run beside ours",
)
@click.option(
    "--gpu-memory",
    default=24.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="GB of each GPU, with --models",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the results there too")
@click.option("--html", "html_path", type=click.Path(dir_okay=False), help="Write a page that draws them")
@click.pass_context
def command(
    context: click.Context,
    /,
    policies: Sequence[str],
    recommend: bool,
    json_path: str | None,
    html_path: str | None,
    **given: Any,
) -> None:
    """Run a trace through a simulated deployment under one policy or several, and compare the results.

    Times are virtual: minutes of a trace take a second.
    """
    from dynaplan.graph.config import find_config_file
    from dynaplan.graph.loading import shipped_graphs
    from dynaplan.lab.simulate.policy_runs import (
        candidates_beside,
        recommend_policy,
        run_simulations,
        service_settings,
        warnings,
    )

    for option, written in (("--json", json_path), ("--html", html_path)):
        if written:
            check_writable(option, Path(written))
    name = given["config_file"]
    file = find_config_file(name, Path.cwd(), beside=shipped_graphs()) if name else None
    models, constraints = many_models(given["models"], file, context.obj, int(given["gpu_memory"] * 1e9))
    if models:
        compare_models(models, constraints, given, json_path)
        return
    graph = read_graph(file, context.obj)
    given["profile"] = context.with_resource(profile_of_engines(given["profile"], graph))
    own = str(graph.sections["Planner"].get("policy", "load"))
    policies = policies or (candidates_beside(own) if recommend else (own,))
    options = simulation_of(policies, given, graph)
    for warning in warnings(options):
        click.echo(f"Warning: {warning}", err=True)
    with ProgressLine() as line:
        watch = _watcher(None if recommend else len(set(policies)), line)
        found = recommend_policy(options, watch) if recommend else None
        results = found.results if found else list(run_simulations(options, watch))
    table = rows(results)
    order = [] if found else dispatched(options)
    below = [*notes(results), *origins(options), *order]
    if found:
        next(row for row in table if row["policy"] == found.policy)["recommended"] = found.words
        below.append(f"Recommended: {found.words}.")
    width = screen.width()
    click.echo("\n".join([text_table(table, width), *(fold(note, width, "  ") for note in below)]))
    if json_path:
        write("--json", json_path, json.dumps(table, indent=2) + "\n")
    if html_path:
        from dynaplan.lab.simulate.page import page

        served = replace(options, disaggregation=service_settings(options).disaggregation)
        write("--html", html_path, page(served, results, order))


@contextmanager
def profile_of_engines(named: str | None, graph: SimulatedGraph) -> Iterator[str | None]:
    """Yield the profile that times the engines; a learnt one is a directory that the ``with`` block keeps.

    ``learnt`` is what was learnt last of the graph's engine and model, ``learnt:NAME`` another one.
    """
    from dynaplan.cli.profiles import find_learnt, newest_learnt, write_profile
    from dynaplan.planner.sla_model import LEARNT

    kind, _, name = (named or "").partition(":")
    if kind != LEARNT:
        yield named
        return
    section = graph.sections[DECODE_COMPONENT]
    decode = find_learnt(name) if name else newest_learnt(section, Role.DECODE)
    if not decode:
        what = f"of {section['model']}" if section.get("model") else "of decode workers"
        hint = "`dynaplan profiles` lists what was; --profile learnt:NAME takes that one."
        raise ConfigError(f"--profile: nothing was learnt {what}", hint=hint)
    prefill = newest_learnt(decode.of, Role.PREFILL) or decode
    with TemporaryDirectory() as directory:
        write_profile(Path(directory), decode, prefill)
        yield directory


def many_models(
    text: str | None, file: Path | None, overrides: Sequence[str], gpu_memory_bytes: int
) -> tuple[dict[str, SimulatedModel], Constraints]:
    """Return the models of ``--models``, or of a file with a section ``Models``, and which of them may be
    loaded at once; no models where there is neither.
    """
    from dynaplan.cli.imported_models import read_config_file
    from dynaplan.lab.simulate.many_models import constraints_of, models_of, read_models

    if text or not file:
        return read_models(text) if text else {}, NO_CONSTRAINTS
    with all_faults() as faults:
        config, _ = read_config_file(file, overrides, Path.cwd(), faults)
    if planned := planned_models(config):
        click.echo(
            f"Warning: no planner is simulated beside other models: the workers of {', '.join(planned)} "
            "follow their requests here. For one of them: simulate with a file for that model alone.",
            err=True,
        )
    return models_of(config, gpu_memory_bytes), constraints_of(config)


def compare_models(
    models: Mapping[str, SimulatedModel],
    constraints: Constraints,
    given: Mapping[str, Any],
    json_path: str | None,
) -> None:
    """Compare our rules for several models with those of other systems, and print the table."""
    from dynaplan.lab.simulate.many_models import COLUMNS, NOTES, ManyModels, rows, run_comparison

    memory_bytes = int(given["gpu_memory"] * 1e9)
    options = ManyModels(given["trace"], models, given["gpus"], memory_bytes, given["seed"], constraints)
    table = rows(run_comparison(options))
    cells = [[heading for heading, _ in COLUMNS.values()]]
    cells += [[shown.format(row[key]) for key, (_, shown) in COLUMNS.items()] for row in table]
    width = screen.width()
    text = tables.text_table(cells, width=width, dropping=["REQUESTS", "READY"])
    click.echo("\n".join([text, *(fold(note, width, "  ") for note in NOTES)]))
    if json_path:
        write("--json", json_path, json.dumps(table, indent=2) + "\n")


def origins(options: SimulateOptions) -> list[str]:
    """Return a sentence for each estimated profile."""
    roles = SCALED_ROLES if options.is_disaggregated else (Role.DECODE,)
    engines = [SimOptions.from_options(options.engine_of(role)) for role in roles]
    words = map(profile_origin, engines)
    return [f"The profile is {each}." for each in dict.fromkeys(words) if each]


def dispatched(options: SimulateOptions) -> list[str]:
    """Return the sentence on the order of queued prompts, where it is another one than that of arrival."""
    from dynaplan.lab.simulate.policy_runs import deadline_of

    deadline = deadline_of(options)
    return [f"Queued prompts are computed {deadline}."] if deadline.ms else []


def _watcher(policies: int | None, line: ProgressLine) -> Callable[[str, int, float, float], None]:
    """Return the function that shows how far the simulations are; the time left is that of this pass.

    ``policies`` is their number, where it is known.
    """
    of_all = f" of {policies}" if policies else ""
    begun_s: dict[tuple[str, int], float] = {}

    def watch(name: str, number: int, at_s: float, length_s: float) -> None:
        now_s = time.monotonic()
        passed_s = now_s - begun_s.setdefault((name, number), now_s)
        which = f"policy {len({key[0] for key in begun_s})}{of_all}, {name}"
        if name == BEST_STATIC:
            which += f", split {number}"
        part = f"{at_s / length_s:.0%} of {clock(length_s)} simulated" if length_s else "simulating"
        left = left_words(time_left_s(at_s, length_s, passed_s) if passed_s > SETTLED_S else None)
        line.show(", ".join(filter(None, (which, part, left))))

    return watch


SETTLED_S = 1.0
"""Seconds of a simulation after which the time left is estimated by its pace."""


def check_writable(option: str, path: Path) -> None:
    """Raise ConfigError for a file that cannot be written: before the simulation, not after it."""
    directory = path.absolute().parent
    if not directory.is_dir():
        raise _unwritable(option, str(path), "No such directory")
    if not os.access(path if path.exists() else directory, os.W_OK):
        raise _unwritable(option, str(path), "Permission denied")


def write(option: str, path: str, text: str) -> None:
    """Write the file that an option names; raises ConfigError when it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(option, path, error.strerror) from error


def _unwritable(option: str, path: str, why: str | None) -> ConfigError:
    return ConfigError(
        f"{option}: {path!r}: {why}", hint="Expected a file in a directory that exists and is yours."
    )


def text_table(table: Sequence[Mapping[str, Any]], width: int = 0) -> str:
    """Return the rows under their headings, latencies in ms, a dash for a missing value.

    With ``width`` > 0 the less important columns are left out until a line has at most ``width`` characters.
    """
    columns = columns_of(table)
    cells = [[heading for heading, _ in columns.values()]]
    cells += [
        ["-" if row.get(key) is None else shown.format(row[key]) for key, (_, shown) in columns.items()]
        for row in table
    ]
    return tables.text_table(cells, width=width, dropping=[COLUMNS[key][0] for key in OPTIONAL_COLUMNS])


def target_ms(name: str, given: Mapping[str, Any], planner: Mapping[str, Any]) -> float:
    """Return a target in ms: of the command line, or else of the planner's options, or its default."""

    if given[name] is not None:
        return float(given[name])
    stated = {name: planner[name]} if name in planner else {}
    return float(PlannerSettings.from_options(stated).to_options()[name])


def simulation_of(
    policies: Sequence[str], given: Mapping[str, Any], graph: SimulatedGraph
) -> SimulateOptions:
    """Return the simulation of a graph; ``given`` are the command's options, by their parameters' names.

    Raises ConfigError for a value that the graph cannot have.
    """

    planner, routing = graph.sections["Planner"], graph.routing()
    decode, prefill = graph.engines()
    profile = {"profile": given["profile"]} if given["profile"] else {}
    startup_s = max(map(_without_startup, (decode, prefill))) or DEFAULT_STARTUP_S
    mode = given["mode"] or ("disagg" if routing["disaggregation"].is_on else "agg")
    return SimulateOptions(
        trace=given["trace"],
        policies=tuple(policies),
        gpus=given["gpus"],
        is_disaggregated=mode == "disagg",
        startup_time_s=startup_s if given["startup_time"] is None else given["startup_time"],
        rate_scale=given["rate_scale"],
        last_s=given.get("last"),
        slo=Slo(*(target_ms(name, given, planner) for name in ("ttft", "itl"))),
        first=_targets(given["start"], mode, graph),
        seed=given["seed"],
        engine={**decode, **profile},
        prefill_engine={**prefill, **profile},
        planner=planner,
        **{**routing, "routing": replace(routing["routing"], **_routing(given))},
    )


def _routing(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the command line's options of the router."""
    stated = {"mode": given["router"], "is_kv_events": given["kv_events"]}
    return {name: value for name, value in stated.items() if value is not None}


DEFAULT_STARTUP_S = 60.0
"""Seconds from a worker's start to ready, where nothing says otherwise."""


def _without_startup(engine: dict[str, Any]) -> float:
    """Remove the start-up time from the engine's options, and return it in seconds; 0 without one."""

    startup_s = SimOptions.from_options(engine).startup_time_s
    engine.pop("startup-time", None)
    return startup_s


def _targets(text: str | None, mode: str, graph: SimulatedGraph) -> Any:
    if text is None:
        prefill = graph.workers(PREFILL_COMPONENT) if mode == "disagg" else 0
        return PoolSizes(prefill, graph.workers(DECODE_COMPONENT))
    numbers = text.split(",")
    if len(numbers) != (2 if mode == "disagg" else 1) or not all(each.isdecimal() for each in numbers):
        raise ConfigError(f"--start: {text!r}", hint="Expected P,D, or N with --mode agg.")
    *before, decode = map(int, numbers)
    if not decode:
        raise ConfigError(f"--start: {text!r}", hint="Expected a decode worker: nobody else answers.")
    return PoolSizes(before[0] if before else 0, decode)
