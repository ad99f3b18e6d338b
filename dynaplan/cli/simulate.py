"""``dynaplan simulate``: what a policy would have done to a trace, in virtual time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dynaplan.cli.overriding import OverridingCommand, sections_of
from dynaplan.domain.errors import ConfigError

COLUMNS: Mapping[str, tuple[str, str]] = {
    "policy": ("POLICY", "{}"),
    "slo": ("SLO MET", "{:.1%}"),
    "ttft_slo": ("TTFT MET", "{:.1%}"),
    "itl_slo": ("ITL MET", "{:.1%}"),
    "goodput_per_s": ("GOODPUT/s", "{:.2f}"),
    "ttft_p50_ms": ("TTFT p50", "{:.0f}"),
    "ttft_p95_ms": ("p95", "{:.0f}"),
    "itl_p50_ms": ("ITL p50", "{:.1f}"),
    "itl_p95_ms": ("p95", "{:.1f}"),
    "queued_p95_ms": ("QUEUED p95", "{:.0f}"),
    "gpu_hours": ("GPU-HOURS", "{:.3f}"),
    "scale_events": ("SCALED", "{}"),
    "flaps": ("FLAPS", "{}"),
    "lost": ("LOST", "{}"),
    "slo_of_oracle": ("SLO/ORACLE", "{:.2f}"),
    "gpu_hours_of_oracle": ("GPU-HOURS/ORACLE", "{:.2f}"),
}
"""The last two are there when the oracle is."""


@click.command(
    cls=OverridingCommand,
    name="simulate",
    short_help="Try policies on a trace, in virtual time.",
    epilog="Any option of the planner or of the engine: --Planner.key=value, --VllmWorker.key=value",
)
@click.option(
    "--trace", required=True, help="A trace file, or made-up load: sinusoid:low=5,high=20,period=150"
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("load",),
    help="load, sla, both, formula, static:P,D, hpa, kpa or oracle",
)
@click.option(
    "-f",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Graph's YAML: takes the VllmWorker's and the Planner's options from there",
)
@click.option("--profile", default=None, help="Measured profile that times the engines: a name or a path")
@click.option("--gpus", default=8, show_default=True, type=click.IntRange(1))
@click.option("--mode", type=click.Choice(["disagg", "agg"]), default="disagg", show_default=True)
@click.option(
    "--startup-time", default=60.0, show_default=True, help="Seconds from a worker's start to ready"
)
@click.option("--rate-scale", default=1.0, show_default=True, help="So many times the trace's requests")
@click.option("--ttft", default=None, type=float, help="Target in ms  [default: the planner's, 500]")
@click.option("--itl", default=None, type=float, help="Target in ms  [default: the planner's, 50]")
@click.option("--start", default=None, help="Workers to begin with: P,D, or N with --mode agg")
@click.option("--router", default="round-robin", show_default=True, help="How a worker is chosen")
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the results there too")
@click.option("--html", "html_path", type=click.Path(dir_okay=False), help="Write a page that draws them")
@click.pass_context
def command(
    context: click.Context,
    /,
    policies: Sequence[str],
    json_path: str | None,
    html_path: str | None,
    **given: Any,
) -> None:
    """Run a trace through a simulated deployment under one policy or several, and compare what comes of it.

    Times are virtual: minutes of a trace take a second.
    """
    from dynaplan.planner.simulate import rows, run_simulations

    options = _options(policies, given, _sections(context, given))
    results = []
    for result in run_simulations(options):
        results.append(result)
    table = rows(results)
    click.echo(text_table(table))
    if json_path:
        _write("--json", json_path, json.dumps(table, indent=2) + "\n")
    if html_path:
        from dynaplan.planner.page import page

        _write("--html", html_path, page(options, results, table, columns_of(table)))


def _write(option: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{option}: {path!r}: {error.strerror}", hint="expected a file in a directory that is there"
        ) from error


def text_table(table: Sequence[Mapping[str, Any]]) -> str:
    """The rows under their headings, latencies in ms."""
    columns = columns_of(table)
    cells = [[heading for heading, _ in columns.values()]]
    cells += [[shown.format(row[key]) for key, (_, shown) in columns.items()] for row in table]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def columns_of(table: Sequence[Mapping[str, Any]]) -> Mapping[str, tuple[str, str]]:
    """Those that the table has."""
    return {key: column for key, column in COLUMNS.items() if not table or key in table[0]}


def _sections(context: click.Context, given: Mapping[str, Any]) -> Mapping[str, dict[str, Any]]:
    """The engine's and the planner's options: of the file, then of the command line."""
    overridden = sections_of(context.obj, SECTIONS)
    if given["config_file"] is None:
        return overridden
    from dynaplan.sdk.config import read_config
    from dynaplan.sdk.service_config import ServiceConfig, kebab_keys

    config = ServiceConfig(read_config(given["config_file"], context.obj))
    return {name: kebab_keys(config.get_parsed_config(name)) for name in SECTIONS}


SECTIONS = ("Planner", "VllmWorker")


def _target_ms(name: str, given: Mapping[str, Any], planner: Mapping[str, Any]) -> float:
    """What the command line says, or the planner's option, or its default."""
    from dynaplan.domain.planner_settings import PlannerSettings

    if given[name] is not None:
        return float(given[name])
    told = {name: planner[name]} if name in planner else {}
    return float(PlannerSettings.from_options(told).to_options()[name])


def _options(
    policies: Sequence[str], given: Mapping[str, Any], sections: Mapping[str, dict[str, Any]]
) -> Any:
    from dynaplan.core.simulation.outcome import Slo
    from dynaplan.planner.simulate import SimulateOptions

    engine = {**sections["VllmWorker"]}
    if given["profile"]:
        engine["profile"] = given["profile"]
    return SimulateOptions(
        trace=given["trace"],
        policies=tuple(policies),
        gpus=given["gpus"],
        is_disaggregated=given["mode"] == "disagg",
        startup_time_s=given["startup_time"],
        rate_scale=given["rate_scale"],
        slo=Slo(*(_target_ms(name, given, sections["Planner"]) for name in ("ttft", "itl"))),
        first=_targets(given["start"], given["mode"]),
        router=given["router"],
        seed=given["seed"],
        engine=engine,
        planner=sections["Planner"],
    )


def _targets(text: str | None, mode: str) -> Any:
    from dynaplan.domain.targets import Targets

    if text is None:
        return None
    numbers = text.split(",")
    if len(numbers) != (2 if mode == "disagg" else 1) or not all(each.isdecimal() for each in numbers):
        raise ConfigError(f"--start: {text!r}", hint="expected P,D, or N with --mode agg")
    *prefill, decode = map(int, numbers)
    return Targets(prefill[0] if prefill else 0, decode)
