"""``dynaplan profile-sla``: measure an engine, and recommend how to serve with it."""

from __future__ import annotations

import asyncio
import logging
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.main import EXIT_INTERRUPTED
from dynaplan.cli.options import config_file_option
from dynaplan.cli.service_options import ServiceOptionsCommand
from dynaplan.util.errors import ConfigError
from dynaplan.util.progress import ProgressLine

if TYPE_CHECKING:
    from dynaplan.lab.profiling.session import ProfileOptions, ProfileResult, RunStage

LOG_FILE = "profile_sla.log"
"""The name of the command's own log in the output directory."""

log = logging.getLogger("dynaplan.profile_sla")


@click.command(
    cls=ServiceOptionsCommand,
    name="profile-sla",
    epilog="Any option of a service: --Service.key=value",
)
@config_file_option("YAML of the graph to serve.")
@click.option(
    "--output-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("profiling_results"),
    show_default=True,
    help="Directory of all results; with the same one again, only missing points are measured.",
)
@click.option("--isl", type=click.IntRange(1), default=3000, show_default=True, help="Target prompt, tokens.")
@click.option("--osl", type=click.IntRange(2), default=500, show_default=True, help="Target answer, tokens.")
@click.option(
    "--ttft",
    type=click.FloatRange(0.0, min_open=True),
    default=50.0,
    show_default=True,
    help="Target in ms.",
)
@click.option(
    "--itl", type=click.FloatRange(0.0, min_open=True), default=5.0, show_default=True, help="Target in ms."
)
@click.option(
    "--max-context-length",
    type=click.IntRange(1),
    default=None,
    help="Longest prompt with its answer, tokens; default: the engine's context.",
)
@click.option("--prefill-interpolation-granularity", type=click.IntRange(3), default=16, show_default=True)
@click.option("--decode-interpolation-granularity", type=click.IntRange(1), default=6, show_default=True)
@click.option("--gpus", type=click.IntRange(0, 1024), default=None, help="Use this many GPUs; default: all.")
@click.option("--min-gpus-per-engine", type=click.IntRange(1), default=1, show_default=True)
@click.option("--max-gpus-per-engine", type=click.IntRange(1), default=None, help="Default: all GPUs.")
@click.option(
    "--max-kv-tokens",
    type=click.IntRange(1),
    default=None,
    help="Tokens that the KV cache holds, for an engine that does not state them.",
)
@click.option(
    "--start-timeout",
    type=click.FloatRange(0.0, min_open=True),
    default=1800.0,
    show_default=True,
    help="Seconds that an engine may take to start.",
)
@click.option(
    "--estimate",
    is_flag=True,
    help="Start nothing: have NVIDIA's aiconfigurator estimate the times. Needs --max-kv-tokens.",
)
@click.option("--gpu-type", metavar="NAME", help="Of --estimate, such as h100_sxm.")
@click.option("--graph", default="graphs.agg:Frontend", show_default=True, help="The aggregated graph.")
@click.pass_context
def command(context: click.Context, /, config_file: str | None, **given: Any) -> int:
    """Measure TTFT and ITL of an engine for each tensor parallel size, and recommend one.

    Each size is started by itself on this box. Points that were measured before are not measured again. With
    --estimate nothing is started, and this box needs no GPU.
    """
    if config_file is None:
        raise click.UsageError(
            "Missing option '-f', the configuration of the engine. For example:\n"
            "  dynaplan profile-sla -f llamacpp.yaml --Common.model=model.gguf --ttft 500 --itl 50",
            context,
        )
    options = _options(config_file, context.obj, given)
    _check_names(options)
    options, run_stage = _estimated(options, given) if given["estimate"] else _measured(options, given)
    progress = ProfileProgress()
    _log_to(options.output_dir / LOG_FILE)
    profiled = _run(options, progress, run_stage)
    if profiled is None:
        click.echo(
            "Interrupted; the deployment has ended. The same command goes on where this one was.", err=True
        )
        return EXIT_INTERRUPTED
    _report(profiled, progress)
    progress.report(_next_step(options))
    return 0


class ProfileProgress:
    """Prints lines on standard output, and to the log file, and the progress on standard error."""

    def __init__(self, line: ProgressLine | None = None) -> None:
        self._line = line or ProgressLine()

    def report(self, line: str) -> None:
        self._line.erase()
        click.echo(line)
        log.info(line)

    @contextmanager
    def stage(self, label: str, points: int) -> Iterator[Callable[[], None]]:
        """Show the points that are done and left; no time: later points take far longer."""
        done = 0

        def show() -> None:
            text = f"{label}: {done} of {points} points measured"
            self._line.show(text, text)

        def advance() -> None:
            nonlocal done
            done += 1
            show()

        show()
        with self._line:
            yield advance


def _log_to(path: Path) -> None:
    """Write the lines that the user sees to this file too; the first line makes it."""
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def _options(config_file: str, overrides: list[str], given: dict[str, Any]) -> ProfileOptions:
    from dynaplan.graph.config import find_config_file, read_config
    from dynaplan.graph.loading import load_graph
    from dynaplan.lab.profiling.recommendation import Goal
    from dynaplan.lab.profiling.session import ProfileOptions

    directory = Path.cwd()
    graph = load_graph(given["graph"], directory)
    path = find_config_file(config_file, directory, graph)
    return ProfileOptions(
        config=read_config(path, overrides),
        output_dir=given["output_dir"].resolve(),
        goal=Goal(given["isl"], given["osl"], given["ttft"], given["itl"]),
        graph=given["graph"],
        max_context_tokens=given["max_context_length"],
        prefill_granularity=given["prefill_interpolation_granularity"],
        decode_granularity=given["decode_interpolation_granularity"],
        gpus=given["gpus"],
        min_gpus=given["min_gpus_per_engine"],
        max_gpus=given["max_gpus_per_engine"],
        max_kv_tokens=given["max_kv_tokens"],
        start_timeout_s=given["start_timeout"],
    )


def _check_names(options: ProfileOptions) -> None:
    """Raise ConfigError for an option that no service has, before anything is started."""
    from dynaplan.graph.config import validate_config
    from dynaplan.graph.loading import load_graph
    from dynaplan.lab.profiling.measured_config import PREFILL_WORKER, WORKER, Phase, measured_config

    graph = load_graph(options.graph, Path.cwd())
    validate_config(graph, measured_config(options.config, Phase.DECODE, 1))
    try:
        validate_config(graph, measured_config(options.config, Phase.PREFILL, 1))
    except ConfigError as error:
        # The decode worker's own section is right: this one has the settings of the PrefillWorker.
        fault = error.args[0].replace(f"{WORKER}.", f"{PREFILL_WORKER}.", 1)
        raise ConfigError(fault, hint=error.hint) from error


def _measured(options: ProfileOptions, given: dict[str, Any]) -> tuple[ProfileOptions, RunStage]:
    """Return the options, and the stage that measures an engine; ConfigError for ``--gpu-type``."""
    from dynaplan.lab.profiling.stage import run_stage

    if given["gpu_type"]:
        raise ConfigError(f"--gpu-type is '{given['gpu_type']}'", hint="--gpu-type is for --estimate.")
    return options, run_stage


def _estimated(options: ProfileOptions, given: dict[str, Any]) -> tuple[ProfileOptions, RunStage]:
    """Return the options of an estimate, and the stage that estimates instead of measuring an engine."""
    from dynaplan.lab.profiling.estimating import estimated_engine

    engine = estimated_engine(options.config, given["gpu_type"], options.max_kv_tokens)
    return replace(options, origin=engine.origin), engine.run_stage


def _run(options: ProfileOptions, progress: ProfileProgress, run_stage: RunStage) -> ProfileResult | None:
    """Run to the end; None when it was interrupted, and has ended in order."""
    import uvloop

    from dynaplan.lab.profiling.session import profile

    async def run_until_signal() -> ProfileResult | None:
        task = asyncio.create_task(profile(options, progress, run_stage))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return None

    return uvloop.run(run_until_signal())


def _next_step(options: ProfileOptions) -> str:
    """Return the command that serves the profiled model, on the graph for which the written file is."""
    from dynaplan.config.settings.frontend import PREFILL_COMPONENT
    from dynaplan.lab.profiling.results import CONFIG_FILE

    is_shipped = options.graph == "graphs.agg:Frontend"
    graph = "graphs.disagg:Frontend" if is_shipped and PREFILL_COMPONENT in options.config else options.graph
    file = shlex.quote(str(options.output_dir / CONFIG_FILE))
    goal = options.goal
    return (
        f"Serve with it:  dynaplan serve {graph} -f {file}\n"
        f"  It plans for TTFT {goal.ttft_ms:g} ms and ITL {goal.itl_ms:g} ms; --Planner.ttft=... and "
        "--Planner.itl=... are others."
    )


def _report(profiled: ProfileResult, progress: ProfileProgress) -> None:
    for line in (*profiled.recommendation.lines, *profiled.recommendation.notes):
        progress.report(line)
    progress.report("Written:")
    for path in profiled.files:
        progress.report(f"  {path}")
