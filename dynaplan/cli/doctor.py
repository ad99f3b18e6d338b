"""``dynaplan doctor``: what this box has and lacks for a deployment, a finding for each need."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import psutil

from dynaplan import __version__
from dynaplan.cli.options import config_file_option, json_option
from dynaplan.cli.service_options import GRAPH_OF_MODELS, ServiceOptionsCommand
from dynaplan.process.memory import box_memory
from dynaplan.util import screen
from dynaplan.util.amounts import gib
from dynaplan.util.errors import ConfigError, DynaplanError, SeveralErrors, UserError
from dynaplan.util.tables import fold

if TYPE_CHECKING:
    from dynaplan.cli.model_needs import ModelNeeds
    from dynaplan.graph.model import GraphSpec

Config = Mapping[str, Mapping[str, Any]]
"""The options of each section."""

FIT_CONTEXT_TOKENS = 1000
"""The context of each request when doctor says how many a model bears at once."""


def _size(context: click.Context, parameter: click.Parameter, text: str) -> int:
    from dynaplan.cli.serve import memory_size

    return memory_size(text)


@click.command(
    cls=ServiceOptionsCommand,
    name="doctor",
    epilog="With -f, any option of its sections: --Models.NAME.key=value",
)
@json_option
@config_file_option("A file of models that are loaded on request: also says which of them fit at once.")
@click.option("--gpus", type=click.IntRange(0, 1024), help="With -f: as of `dynaplan serve`.")
@click.option(
    "--model-memory", default="", metavar="SIZE", help="With -f: as of `dynaplan serve`.", callback=_size
)
@click.pass_context
def command(
    context: click.Context,
    /,
    as_json: bool,
    config_file: str | None,
    gpus: int | None,
    model_memory: int,
) -> int:
    """Say what this box has and lacks, and what to do next about each. Starts and changes nothing.

    The exit code is 1 when `dynaplan serve` cannot work here, else 0.
    """
    found = list(findings())
    if config_file:
        found += file_findings(config_file, context.obj, gpus, model_memory)
    if as_json:
        rows = [{"level": each.level.value, **_plain(each)} for each in found]
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo(page(found, screen.width()))
    return int(any(each.level is Level.FAULT for each in found))


def _plain(finding: Finding) -> dict[str, str]:
    return {"topic": finding.topic, "says": finding.says, "advice": finding.advice}


def page(found: Sequence[Finding], width: int) -> str:
    """Return the findings as lines, what to do next below each, and their numbers."""

    wide = max((len(each.topic) for each in found), default=0)
    indent = " " * (6 + wide + 2)
    paint = {Level.OK: screen.good, Level.WARNING: screen.warning, Level.FAULT: screen.error}
    lines = []
    for each in found:
        mark = paint.get(each.level, str)(each.level.value) + " " * (6 - len(each.level.value))
        text = fold(f"{each.topic.ljust(wide)}  {each.says}", max(0, width - 6), indent[6:])
        lines.append(mark + text.replace("\n", "\n      "))
        if each.advice:
            lines.append(fold(f"{indent}-> {each.advice}", width, f"{indent}   "))
    faults, warnings = (sum(each.level is level for each in found) for level in (Level.FAULT, Level.WARNING))
    last = (
        f"`dynaplan serve` cannot work here: {faults} to mend" if faults else "`dynaplan serve` can work here"
    )
    number = "1 warning" if warnings == 1 else f"{warnings} warnings"
    lines += ["", f"{last}; {number}."]
    return "\n".join(lines)


class Level(Enum):
    """The weight of a finding: all is well, a thing that some need, a thing to mend, and no start at all."""

    OK = "ok"
    NOTE = "-"
    WARNING = "warn"
    FAULT = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One thing that the box has or lacks, and what to do next; ``advice`` is empty where all is well."""

    level: Level
    topic: str
    says: str
    advice: str = ""


MIN_SHARED_MEMORY_BYTES = 1 << 30
"""Memory in /dev/shm below which engines of several GPUs fail: NCCL and torch keep their buffers there, and a
container has 64 MiB by default."""

MIN_OPEN_FILES = 8192
"""Open files that a busy box needs: each stream takes two descriptors of a frontend."""

MIN_DISK_BYTES = 2 * 10**9
"""Free bytes that logs and state should have."""

MIN_MEMORY_BYTES = 2 * 10**9
"""Memory that a deployment without a real engine needs with some to spare."""


def python() -> Iterator[Finding]:
    """Check Python and the system."""
    version = ".".join(map(str, sys.version_info[:3]))
    says = f"dynaplan {__version__}, Python {version} at {sys.executable}"
    if sys.platform == "linux":
        yield Finding(Level.OK, "dynaplan", says)
    else:
        yield Finding(Level.FAULT, "dynaplan", f"{says}, on {sys.platform}", "It runs on Linux only.")


def gpus() -> Iterator[Finding]:
    """Check the driver, the GPUs, and what is in use of them."""

    from dynaplan.fleet.gpu_devices import available_gpus, driver_version, uses_reader

    version, fault = driver_version()
    devices = sorted(each.name for each in Path("/dev").glob("nvidia[0-9]*"))
    if fault and devices:
        yield Finding(
            Level.WARNING,
            "GPUs",
            f"{', '.join(devices)} are here, but NVML is not: {fault}",
            "In a container, pass the driver's libraries on: --gpus all, NVIDIA_DRIVER_CAPABILITIES=all.",
        )
        return
    if fault:
        yield Finding(
            Level.NOTE,
            "GPUs",
            f"no NVIDIA driver ({fault}): `serve` simulates 8 GPUs",
            "For real engines on GPUs install NVIDIA's driver; `nvidia-smi` must show them.",
        )
        return
    found, _ = available_gpus(None)
    names = ", ".join(sorted({each.name for each in found}))
    yield Finding(
        Level.OK if found else Level.WARNING,
        "GPUs",
        f"{len(found)} visible ({names or 'none'}), driver {version}",
        "" if found else "CUDA_VISIBLE_DEVICES hides them all: unset it.",
    )
    for index, use in uses_reader(found)().items():
        if use.processes:
            users = ", ".join(f"{each.name or 'a process'} ({each.pid})" for each in use.processes)
            yield Finding(
                Level.WARNING,
                f"GPU {index}",
                f"{gib(use.used_bytes)} in use by {users}",
                "`serve` leaves it out; --use-busy-gpus takes it all the same.",
            )


def engines() -> Iterator[Finding]:
    """Check which engines can run here."""

    from dynaplan.engines.registry import ENGINES, engine_kind

    requirements = {name: need for name in ENGINES if (need := engine_kind(name).requirement)}
    found = {name: requirement.find() for name, requirement in requirements.items()}
    for name, requirement in requirements.items():
        if found[name]:
            yield Finding(Level.OK, f"engine {name}", f"is here: {found[name]}")
        else:
            advice = f"pip install '{requirement.package}'"
            yield Finding(Level.NOTE, f"engine {name}", "is not installed", advice)
    if not any(found.values()):
        yield Finding(
            Level.WARNING,
            "engines",
            "only the simulated one can run",
            "Install one of these to serve a model; llamacpp runs on any CPU: `dynaplan pull` has models.",
        )


def servers() -> Iterator[Finding]:
    """Check for the servers that a deployment starts beside its own processes."""
    from dynaplan.fleet.servers import find_etcd, find_nats_server

    finders: Mapping[str, tuple[str, Callable[[], str]]] = {
        "etcd": ("ETCD_ENDPOINTS", lambda: find_etcd()[0]),
        "NATS": ("NATS_SERVER", find_nats_server),
    }
    for topic, (variable, find) in finders.items():
        if os.environ.get(variable):
            yield Finding(Level.OK, topic, f"{variable} names one of yours")
            continue
        try:
            yield Finding(Level.OK, topic, find())
        except UserError as error:
            store = " --store file needs no etcd." if topic == "etcd" else ""
            yield Finding(Level.FAULT, topic, error.args[0], f"{error.hint}{store}")


def port() -> Iterator[Finding]:
    """Check whether the Frontend's usual port is free."""
    from dynaplan.config.settings.frontend import FrontendSettings
    from dynaplan.fleet.deployments import port_holder

    number = FrontendSettings.port
    holder = port_holder(number)
    if holder:
        yield Finding(
            Level.WARNING,
            "port",
            f"{number} is taken by {holder}",
            "`serve --port N`; 0 lets the kernel choose.",
        )
    else:
        yield Finding(Level.OK, "port", f"{number} is free")


def deployments() -> Iterator[Finding]:
    """List the deployments that run here."""
    from dynaplan.fleet.deployments import find_deployments

    try:
        running = find_deployments()
    except DynaplanError:
        yield Finding(Level.OK, "deployments", "none is running here")
        return
    for each in running:
        says = f"{each.namespace} runs at {each.frontend_url} (serve pid {each.arbiter.pid})"
        yield Finding(Level.OK, "deployments", says)


def shared_memory() -> Iterator[Finding]:
    """Check the memory in which engines and workers share data."""
    place = Path(os.environ.get("DYNAPLAN_MEMORY_DIR") or "/dev/shm")
    try:
        size = shutil.disk_usage(place)
    except OSError as error:
        yield Finding(
            Level.WARNING,
            "shared memory",
            f"{place}: {error.strerror}",
            "Mount a tmpfs there: hand-offs use it.",
        )
        return
    says = f"{place} has {gib(size.free)} of {gib(size.total)} free"
    if not os.access(place, os.W_OK):
        yield Finding(
            Level.WARNING, "shared memory", f"{place} is not writable", "Give write permission there."
        )
    elif size.free < MIN_SHARED_MEMORY_BYTES:
        advice = (
            "Engines of several GPUs need more: in a container --shm-size=8g or --ipc=host; else free some."
        )
        yield Finding(Level.WARNING, "shared memory", says, advice)
    else:
        yield Finding(Level.OK, "shared memory", says)


def limits() -> Iterator[Finding]:
    """Check the limits of this shell on open files and processes."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    shown = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard}"
    if hard != resource.RLIM_INFINITY and hard < MIN_OPEN_FILES:
        advice = "Raise it: `ulimit -Hn`, /etc/security/limits.conf, or LimitNOFILE= of the unit."
        yield Finding(Level.WARNING, "open files", f"the hard limit is {shown}", advice)
    else:
        yield Finding(Level.OK, "open files", f"the hard limit is {shown}; `serve` raises the soft one")
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if 0 <= processes < 1024:
        advice = "Raise `ulimit -Hu`: engines start hundreds of threads."
        yield Finding(Level.WARNING, "processes", f"the hard limit is {processes}", advice)


def memory() -> Iterator[Finding]:
    """Check the memory that processes may use."""
    box = box_memory()
    says = f"{gib(box.available_bytes)} of {gib(box.total_bytes)} available, {psutil.cpu_count()} CPUs"
    if box.available_bytes < MIN_MEMORY_BYTES:
        advice = "Free some, or raise the container's limit: the kernel ends what asks for too much."
        yield Finding(Level.WARNING, "memory", says, advice)
    else:
        yield Finding(Level.OK, "memory", says)


def directories() -> Iterator[Finding]:
    """Check the directories of state and logs."""

    from dynaplan.fleet.statefile_store import statefile_path

    base = os.environ.get("DYN_CIRCUS_LOG_DIR")
    logs = Path(os.path.expanduser(base)) if base else Path.home() / ".dynamo" / "logs"
    places = {"state": (statefile_path(os.environ, "any").parent, "DYN_LOCAL_STATE_DIR")}
    places["logs"] = (logs, "DYN_CIRCUS_LOG_DIR")
    for topic, (place, variable) in places.items():
        there = next(each for each in (place, *place.parents) if each.exists())
        if not os.access(there, os.W_OK | os.X_OK):
            advice = f"Give write permission there, or set {variable} to another directory."
            yield Finding(Level.FAULT, topic, f"{place} cannot be written", advice)
            continue
        free = shutil.disk_usage(there).free
        says = f"{place}, {gib(free)} free"
        if free < MIN_DISK_BYTES:
            advice = f"Free some space, or set {variable} to another disk."
            yield Finding(Level.WARNING, topic, says, advice)
        else:
            yield Finding(Level.OK, topic, says)


def extras() -> Iterator[Finding]:
    """Check for the programs that are of use beside a deployment."""
    prometheus = shutil.which("prometheus")
    if prometheus:
        yield Finding(Level.OK, "Prometheus", f"{prometheus}: `dynaplan export prometheus` configures it")
    else:
        yield Finding(
            Level.NOTE,
            "Prometheus",
            "is not installed; the planner does without it",
            "To keep metrics: apt install prometheus, then `dynaplan export prometheus`.",
        )
    if Path("/run/systemd/system").is_dir():
        yield Finding(Level.OK, "systemd", "runs here: `dynaplan export systemd` starts a deployment at boot")
    else:
        yield Finding(
            Level.NOTE, "systemd", "does not run here", "`serve --detach` leaves it in the background."
        )


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    *(python, gpus, engines, servers, port, deployments),
    *(shared_memory, limits, memory, directories, extras),
)
"""All checks, in the order in which they are shown."""


def findings() -> Iterator[Finding]:
    """Run every check; one that fails itself is a finding too, and hides none of the others."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:
            says = f"could not be looked at: {type(error).__name__}: {error}"
            yield Finding(Level.WARNING, check.__name__.replace("_", " "), says)


def file_findings(file: str, overrides: Sequence[str], gpus: int | None, budget_bytes: int) -> list[Finding]:
    """Return which models of a file fit, or every error for which ``serve`` would refuse the file."""
    from dynaplan.cli.model_needs import model_needs

    try:
        graph, config = _read_models_file(file, overrides, gpus)
        found = model_needs(graph, config, gpus, budget_bytes)
        return [*model_findings(found, file), *learnt_findings(config)]
    except UserError as error:
        errors = error.errors if isinstance(error, SeveralErrors) else (error,)
        return [Finding(Level.FAULT, Path(file).name, each.args[0], each.hint) for each in errors]


def read_model_needs(file: str, overrides: Sequence[str], gpus: int | None, budget_bytes: int) -> ModelNeeds:
    """Read what the models of a file need; raises ConfigError for a file without any."""
    from dynaplan.cli.model_needs import model_needs

    return model_needs(*_read_models_file(file, overrides, gpus), gpus, budget_bytes)


def _read_models_file(file: str, overrides: Sequence[str], gpus: int | None) -> tuple[GraphSpec, Config]:
    """Return the graph and the configuration of a file of models."""
    from dynaplan.cli.loading import load_deployment
    from dynaplan.cli.serve import usable_gpus

    _, config, graph, _ = load_deployment(
        GRAPH_OF_MODELS, file, Path.cwd(), None, overrides, lambda: usable_gpus(gpus)
    )
    if not graph.on_demand:
        hint = "`dynaplan serve GRAPH -f FILE --dry-run` checks the configuration of a graph."
        raise ConfigError(f"{file} has no models that are loaded on request (no section Models)", hint=hint)
    return graph, config


def learnt_findings(config: Config) -> Iterator[Finding]:
    """Say how many requests at once each model bears within its ITL, where its steps were learnt."""
    from dynaplan.cli.profiles import newest_learnt
    from dynaplan.config.model_entries import planned_models, served_models
    from dynaplan.config.planner import settings_of
    from dynaplan.config.service_config import section_options
    from dynaplan.graph.lifecycle import Role

    planned = planned_models(config)
    for each in served_models(config):
        itl_ms = settings_of(planned.get(each.name, {})).targets().itl_ms
        options = section_options(config, each.component)
        if found := newest_learnt(options, Role.DECODE):
            most = found.learnt.most_sequences(itl_ms, FIT_CONTEXT_TOKENS)
            says = (
                f"at ITL {itl_ms:g} ms it bears {most} at once, {FIT_CONTEXT_TOKENS:,} tokens of context each"
            )
            yield Finding(Level.OK, f"model {each.name}", f"{says} (error {found.learnt.error:.0%})")


def model_findings(found: ModelNeeds, file: str) -> Iterator[Finding]:
    """Say which models fit at once, which alone, which not now and which never."""
    from dynaplan.cli.model_needs import why_without_room
    from dynaplan.models.rules.fit import fit_models

    fit = fit_models(found.needs, found.devices, found.constraints)
    for note in found.notes:
        yield Finding(Level.WARNING, "models", note)
    for each in found.needs:
        if each.model in found.unknown:
            yield Finding(
                Level.WARNING,
                f"model {each.model}",
                f"its memory is not known before its first load; {gib(each.bytes_each)} are assumed",
                f"Say it, for example Models: {{{each.model}: {{memory: 13GB}}}}.",
            )
        if each.model in fit.never:
            level = Level.FAULT if len(fit.never) == len(found.needs) else Level.WARNING
            yield Finding(level, f"model {each.model}", *why_without_room(each, found.devices))
    sizes = {each.model: each.bytes_each * each.places for each in found.needs}
    sets = [f"{', '.join(names)} ({gib(sum(map(sizes.__getitem__, names)))})" for names in fit.together]
    if len(sets) == 1 and not fit.never:
        yield Finding(Level.OK, "models", f"all fit at once: {sets[0]}")
    elif sets:
        yield Finding(
            Level.NOTE,
            "models",
            f"not all fit at once, but: {'; or '.join(sets)}",
            "A request for another one swaps. `dynaplan simulate --trace agents --gpu-memory GB "
            f"-f {file}` shows how long requests wait then.",
        )
