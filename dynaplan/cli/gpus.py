"""``dynaplan gpus``: all GPUs of the box, and who has which: ours, a person's program, or somebody else's."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.by_hand import record_by_hand
from dynaplan.cli.options import namespace_option
from dynaplan.cli.reserve import check_decode_left, check_known
from dynaplan.cli.run import box_gpus, shown_command
from dynaplan.cli.running_deployment import connect, service_config, standings_of
from dynaplan.cli.scale_args import user_name as own_name
from dynaplan.cli.scale_counts import change_entries, current_entries
from dynaplan.contract.gpu_standing import SET_APART, GpuStanding, GpuStandings
from dynaplan.contract.gpus import Gpu, GpuActivity, GpuUse
from dynaplan.contract.holds import MAX_GPU_INDEX, RESERVATIONS, ReservedGpus, reserved_words
from dynaplan.fleet.deployments import find_deployments
from dynaplan.fleet.gpu_claims import NodeClaims
from dynaplan.fleet.gpu_devices import activity_reader, uses_reader
from dynaplan.fleet.plugin.gpu_availability import GpuClaims
from dynaplan.fleet.rules.statefile import inventory_of, planner_keys_of
from dynaplan.graph.lifecycle import HOLDS_GPUS, Worker
from dynaplan.process import process_table
from dynaplan.process.port_holders import user_name
from dynaplan.store import connections
from dynaplan.util import screen
from dynaplan.util.amounts import GIB
from dynaplan.util.durations import local_time
from dynaplan.util.errors import ConfigError, DeploymentError
from dynaplan.util.tables import text_table

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment

COLUMNS = ("GPU", "NAME", "MEMORY", "WATTS", "TEMP", "WHO", "SINCE", "UNTIL")
COLUMNS_DROPPED = ("NAME", "SINCE", "UNTIL")
"""The columns that a narrow screen does without, the first first."""


@dataclass(frozen=True)
class GpuHolder:
    """Who has a GPU, in words; since when, in Unix seconds (0: not known), and until when, in words."""

    who: str
    since_unix_s: float = 0.0
    until: str = ""


@dataclass(frozen=True)
class BoxGpu:
    """One GPU of the box: its use, as far as the driver tells it, and its holders."""

    gpu: Gpu
    use: GpuUse | None
    activity: GpuActivity
    holders: tuple[GpuHolder, ...]

    def to_json(self) -> dict[str, Any]:
        used_bytes = self.use.used_bytes if self.use else None
        holders = [asdict(each) for each in self.holders]
        return {**asdict(self.gpu), "used_bytes": used_bytes, **asdict(self.activity), "holders": holders}


@click.command(name="gpus")
@namespace_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--retire", type=click.IntRange(0, MAX_GPU_INDEX), metavar="N", help="Set GPU N apart for good."
)
@click.option("--readmit", type=click.IntRange(0, MAX_GPU_INDEX), metavar="N", help="Use GPU N again.")
@click.option("--yes", is_flag=True, help="Retire also what leaves no GPU for a decode worker.")
def command(namespace: str | None, as_json: bool, retire: int | None, readmit: int | None, yes: bool) -> None:
    """Show all GPUs of this box: who has which, since when and until when, memory, watts, temperature.

    A worker is named as in `dynaplan status`, a program that `dynaplan run` has started by its user and
    command, and so is any other that holds memory. A GPU without a holder is free. One that is ill is set
    apart: its workers leave it. --retire does that by hand, and --readmit ends it: what the GPU was set apart
    for does not count again.
    """
    if retire is not None and readmit is not None:
        raise ConfigError("--retire and --readmit are opposites", hint="Give one of them.")
    for index in (each for each in (retire, readmit) if each is not None):
        asyncio.run(
            _change_standing(connect(namespace), index, is_readmitted=readmit is not None, is_sure=yes)
        )
        return
    try:
        running = find_deployments(namespace)
    except DeploymentError:
        if namespace:
            raise
        running = []
    gpus = read_gpus(running)
    if as_json:
        click.echo(json.dumps([each.to_json() for each in gpus], indent=2))
    else:
        click.echo(text_table(gpu_rows(gpus), width=screen.width(), dropping=COLUMNS_DROPPED))


async def _change_standing(
    found: RunningDeployment, index: int, *, is_readmitted: bool, is_sure: bool
) -> None:
    def change(now: GpuStandings) -> GpuStandings:
        standing = now.by_gpu.get(index)
        if is_readmitted:
            if standing is None or not (standing.is_apart or standing.why):
                raise ConfigError(
                    f"GPU {index} is not set apart", hint="`dynaplan gpus` shows who has which."
                )
            return now.with_gpu(index, standing.readmitted())
        if not is_sure:
            check_decode_left(len(inventory) - len(now.apart.keys() | {index}), found.workers)
        kept = standing.readmitted().accepted if standing else ()
        retired = GpuStanding(since_unix_s=round(time.time(), 3), accepted=kept, by=own_name())
        return now.with_gpu(index, retired)

    inventory = inventory_of(found.document)
    check_known([index], inventory)
    async with connections.open_store() as store:
        await change_entries(store, found.namespace, SET_APART, GpuStandings.from_text, change)
    what = f"GPU {index} {'readmitted' if is_readmitted else 'retired'}"
    record_by_hand(found, what)
    click.echo(what + ("" if is_readmitted else ": workers on it leave after their requests"))


def read_gpus(running: Sequence[RunningDeployment]) -> list[BoxGpu]:
    """Read every GPU of the box that may be seen from here, and who has it."""
    gpus = box_gpus(running[0] if running else None)
    uses, activities = uses_reader(gpus)(), activity_reader(gpus)()
    of_workers: dict[int, list[GpuHolder]] = {}
    for found in running:
        known = inventory_of(found.document)
        for worker in found.workers:
            for index in worker.gpus if worker.state in HOLDS_GPUS and known else ():
                of_workers.setdefault(index, []).append(_worker(found, worker))
    loans = _loans(running)
    apart = {
        index: [GpuHolder(standing.words, standing.since_unix_s, _retry(standing))]
        for found in running
        for index, standing in standings_of(found).by_gpu.items()
        if standing.is_apart
    }
    claimed = _claimed(running, gpus)
    own_pids = _own_pids(running)
    found_gpus = []
    for gpu in gpus:
        use = uses.get(gpu.index)
        holders = [*of_workers.get(gpu.index, ()), *apart.get(gpu.index, ()), *loans.get(gpu.index, ())]
        foreign = [each.pid for each in use.processes if each.pid not in own_pids] if use else []
        holders += [_program(pid) for pid in foreign if pid]
        if not holders and gpu.index in claimed:
            holders.append(GpuHolder(claimed[gpu.index]))
        found_gpus.append(BoxGpu(gpu, use, activities.get(gpu.index, GpuActivity()), tuple(holders)))
    return found_gpus


def gpu_rows(gpus: Iterable[BoxGpu]) -> list[tuple[str, ...]]:
    """Return the table's rows, the headings first: a row for each holder, and one for a free GPU."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for each in gpus:
        used = "-" if each.use is None else f"{each.use.used_bytes / GIB:.0f}"
        memory = f"{used} of {each.gpu.memory_bytes / GIB:.0f} GiB" if each.gpu.memory_bytes else "-"
        limit = "" if each.activity.limit_watts is None else f" of {each.activity.limit_watts:.0f}"
        doing = _known(each.activity.watts, limit), _known(each.activity.celsius, " C")
        own: tuple[str, ...] = (str(each.gpu.index), each.gpu.name or "-", memory, *doing)
        for holder in each.holders or (GpuHolder("free"),):
            since = local_time(holder.since_unix_s) if holder.since_unix_s else ""
            rows.append((*own, holder.who, since, holder.until))
            own = ("",) * len(own)
    return rows


def _retry(standing: GpuStanding) -> str:
    return local_time(standing.retry_unix_s) if standing.retry_unix_s else "`--readmit`"


def _known(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def _worker(found: RunningDeployment, worker: Worker) -> GpuHolder:
    model = service_config(found).get(worker.component, {}).get("served_model_name")
    state = "" if worker.state.value == "ready" else f", {worker.state.value}"
    since_s = time.time() - process_table.age_s(worker.started_at) if worker.started_at else 0.0
    return GpuHolder(f"{worker.name}{f' ({model})' if model else ''}{state}", since_s)


def _loans(running: Iterable[RunningDeployment]) -> dict[int, list[GpuHolder]]:
    """Return who has reserved or borrowed GPUs of these deployments: GPU index -> holders."""
    found: dict[int, list[GpuHolder]] = {}
    for each in running:
        text = planner_keys_of(each.document).get(RESERVATIONS, "")
        reserved = current_entries(ReservedGpus.from_text, text).without_ended(process_table.is_alive)
        for index, made in reserved.by_gpu.items():
            if made.holder:
                who = f"{made.by}: {made.command} (pid {made.holder.pid})"
                holder = GpuHolder(who, made.since_s, made.until or "it ends")
            else:
                holder = GpuHolder(reserved_words(made), made.since_s, made.until)
            found.setdefault(index, []).append(holder)
    return found


def _claimed(running: Sequence[RunningDeployment], gpus: Sequence[Gpu]) -> dict[int, str]:
    """Return the GPUs that others than these deployments have claimed: index -> who."""
    arbiters = [(each.arbiter, each.namespace) for each in running]
    arbiters = arbiters or [(process_table.identity_of(os.getpid()), "run")]
    of_others = [GpuClaims(NodeClaims(*each), gpus).held_by_others() for each in arbiters]
    common = set.intersection(*map(set, of_others))
    return {index: why for each in of_others[:1] for index, why in each.items() if index in common}


def _own_pids(running: Iterable[RunningDeployment]) -> set[int]:
    """Return the pids of all processes of workers, and of programs that run on borrowed GPUs."""
    own: set[int] = set()
    for found in running:
        text = planner_keys_of(found.document).get(RESERVATIONS, "")
        loans = current_entries(ReservedGpus.from_text, text).by_gpu.values()
        roots = [each.pid for each in found.workers if each.pid]
        roots += [each.holder.pid for each in loans if each.holder]
        for pid in dict.fromkeys(roots):
            own |= {pid, *process_table.session_members(pid), *process_table.descendants_of(pid)}
    return own


def _program(pid: int) -> GpuHolder:
    """Return a program that no deployment has started, by its user and its command."""
    import psutil

    try:
        process = psutil.Process(pid)
        words = process.cmdline() or [process.name()]
        user = user_name(process.uids().real).removeprefix("user ")
        return GpuHolder(f"{user}: {shown_command(words)} (pid {pid})", process.create_time())
    except (psutil.Error, OSError):
        return GpuHolder(f"pid {pid}, which cannot be inspected")
