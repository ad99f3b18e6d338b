"""``dynaplan reserve gpu=7 --for 3h``: take GPUs from the deployment, after the requests on them.

``dynaplan release [ROLE|gpu=N ...]`` ends reservations, and the holds that ``scale`` makes.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from dynaplan.cli.by_hand import record_by_hand, record_scaling
from dynaplan.cli.options import namespace_option
from dynaplan.cli.running_deployment import connect
from dynaplan.cli.scale_args import describe_hours, new_hold
from dynaplan.cli.scale_counts import (
    WrittenCounts,
    change_entries,
    current_entries,
    describe_next_decision,
    expected_times,
    planner_settings,
    without_holds,
    write_counts,
)
from dynaplan.cli.timing import WORKERS_POLL_S
from dynaplan.contract.gpus import GpuUse, busy_gpus, by_reason
from dynaplan.contract.holds import RESERVATIONS, Hold, ReservedGpus, reserved_words
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.fleet.gpu_devices import uses_reader
from dynaplan.fleet.rules.statefile import inventory_of, planner_keys_of
from dynaplan.graph.lifecycle import HOLDS_GPUS, Role, Worker
from dynaplan.process.process_table import is_alive
from dynaplan.store import connections
from dynaplan.util.blocking_call import BlockingCall
from dynaplan.util.durations import wall_clock
from dynaplan.util.errors import ConfigError, TemporaryError, nearest
from dynaplan.util.progress import ProgressLine

if TYPE_CHECKING:
    from dynaplan.contract.gpus import Gpu
    from dynaplan.fleet.deployments import RunningDeployment

GPU = "gpu="
"""The beginning of an argument that names GPUs: ``gpu=7``, ``gpu=6,7``, ``gpu=4-7``."""

DRIVER_TIMEOUT_S = 10.0
"""Time after which a driver that does not answer is not waited for, in seconds: it has said nothing."""

NOTHING_HELD = "nothing is held"

_NAMED = re.compile(r"gpu=\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", re.ASCII)


@click.command(name="reserve")
@click.argument("gpus", nargs=-1, required=True, metavar="gpu=N[,N]...")
@namespace_option
@click.option("--for", "duration", metavar="TIME", help="For 90s, 10m, 2h or 1d; default: until `release`.")
@click.option("--at", "hours", metavar="HH:MM-HH:MM", help="At 09:00-17:00 of every day.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Return when the GPUs are free.")
@click.option("--timeout", type=click.FloatRange(0.0), help="Seconds to wait.")
@click.option("--yes", is_flag=True, help="Allow what leaves no GPU for a decode worker.")
def reserve(
    gpus: Sequence[str],
    namespace: str | None,
    duration: str | None,
    hours: str | None,
    wait: bool,
    timeout: float | None,
    yes: bool,
) -> None:
    """Reserve GPUs of the deployment for yourself: its workers leave them, and the planner keeps off.

    A worker on such a GPU is drained, after another is ready in its place where there is a GPU for one.
    Other deployments of dynaplan do not get the GPUs either. `dynaplan release gpu=7` gives them back.
    """
    found = connect(namespace)
    chosen = sorted({index for text in gpus for index in parse_gpus(text)})
    made = new_hold(duration, hours)
    inventory = inventory_of(found.document)
    check_known(chosen, inventory)
    asyncio.run(_reserve(found, chosen, made, None if yes else len(inventory)))
    for index in chosen:
        click.echo(
            f"GPU {index} is {reserved_words(made)}"
            + (f": {describe_hours(made, time.time())}" if made.at else "")
        )
    if not wait or not made.is_open(time.time(), wall_clock):
        return
    hint = "It goes on; `dynaplan status` shows how far it is."
    asyncio.run(wait_until_free(found, chosen, timeout, hint))
    uuids = {gpu.index: gpu.uuid for gpu in inventory}
    click.echo(f"free: CUDA_VISIBLE_DEVICES={','.join(uuids[index] for index in chosen)}")


def parse_gpus(text: str) -> list[int]:
    """Return the GPUs that an argument names, ``gpu=7`` or ``gpu=4-6,9``; raises ConfigError."""
    if not _NAMED.fullmatch(text):
        raise ConfigError(f"{text}: no GPUs are named so", hint="For example: gpu=7, gpu=6,7 or gpu=4-7.")
    found: list[int] = []
    for part in text.removeprefix(GPU).split(","):
        first, _, last = part.partition("-")
        if not (named := range(int(first), int(last or first) + 1)):
            raise ConfigError(f"{text}: {part} ends before it begins", hint=f"Expected gpu={last}-{first}.")
        found += named
    return found


def check_known(chosen: Sequence[int], inventory: Sequence[Gpu]) -> None:
    """Raise ConfigError for a GPU index that is not in the inventory."""
    known = [gpu.index for gpu in inventory]
    if missing := [index for index in chosen if index not in known]:
        raise ConfigError(
            f"GPU {','.join(map(str, missing))}: the deployment has {', '.join(map(str, known)) or 'no GPU'}",
            hint="`dynaplan status` shows its GPUs.",
        )


def check_decode_left(left: int, workers: Sequence[Worker]) -> None:
    """Raise ConfigError when ``left``, a number of GPUs, is too few for a decode worker."""
    needed = min((each.gpu_request for each in workers if each.role is Role.DECODE), default=0)
    if left < needed:
        raise ConfigError(
            f"that leaves {left} GPUs, and a decode worker takes {needed:g}: no request would be answered",
            hint="Add --yes if that is meant; `dynaplan stop` ends the deployment.",
        )


async def _reserve(
    found: RunningDeployment, chosen: Sequence[int], made: Hold, gpus: int | None = None
) -> None:
    """Reserve the GPUs ``chosen``; raises ConfigError where another user or a program has one.

    ``gpus`` is the deployment's number of GPUs, of which enough for a decode worker must be left; None: they
    need not.
    """
    from dynaplan.fleet.scale_progress import check_alive

    def change(now: ReservedGpus) -> ReservedGpus:
        now = now.without_ended(is_alive)
        for index in chosen:
            other = now.by_gpu.get(index)
            if other and (other.holder or other.uid != os.getuid()):
                end = f"kill {other.holder.pid}" if other.holder else f"dynaplan release gpu={index}"
                raise ConfigError(f"GPU {index} is {reserved_words(other)}", hint=f"`{end}` ends that.")
        if gpus is not None:
            check_decode_left(gpus - len({*chosen, *now.by_gpu}), found.workers)
        return now.with_gpus(dict.fromkeys(chosen, made))

    check_alive(found)
    async with connections.open_store() as store:
        await change_entries(store, found.namespace, RESERVATIONS, ReservedGpus.from_text, change)
    record_by_hand(found, f"GPU {','.join(map(str, chosen))} {reserved_words(made)}")


async def wait_until_free(
    found: RunningDeployment, chosen: Sequence[int], timeout_s: float | None, hint: str
) -> None:
    """Return when no worker holds any of the GPUs, nor gets one, and the driver says that they are empty.

    Raises TemporaryError with the ``hint`` after ``timeout_s`` seconds; None: as long as workers may take to
    leave.
    """
    from dynaplan.fleet.deployments import find_deployment
    from dynaplan.fleet.scale_progress import check_alive

    gpus = [gpu for gpu in inventory_of(found.document) if gpu.index in chosen]
    uses = BlockingCall[Mapping[int, GpuUse]](uses_reader(gpus), {})
    roles = {worker.role: 1 for worker in found.workers if set(chosen) & set(worker.gpus)}
    longest_s = (
        expected_times(found, roles).limit_s(starts=True, leaves=True) if timeout_s is None else timeout_s
    )
    deadline_s = time.monotonic() + longest_s
    with ProgressLine() as line:
        while names := (
            _awaited(find_deployment(found.namespace), chosen)
            or "; ".join(by_reason(busy_gpus(gpus, await uses.latest_value(DRIVER_TIMEOUT_S)), gpus))
        ):
            check_alive(found)
            if time.monotonic() > deadline_s:
                raise TemporaryError(f"not free within {longest_s:g} s: {names}", hint=hint)
            line.show(f"waiting for {names}", names)
            await asyncio.sleep(WORKERS_POLL_S)


def _awaited(now: RunningDeployment, gpus: Sequence[int]) -> str:
    """Return in words which workers still hold any of these GPUs; empty when none does.

    While the statefile lacks the reservation a worker that is not in it yet may still get one of the GPUs.
    """
    keys = planner_keys_of(now.document)
    reserved = current_entries(ReservedGpus.from_text, keys.get(RESERVATIONS, ""))
    if not set(gpus) <= reserved.by_gpu.keys():
        return "the fleet plugin (has not read the reservation yet)"
    holders = [each for each in now.workers if each.state in HOLDS_GPUS and set(gpus) & set(each.gpus)]
    return ", ".join(f"{each.name} ({each.state.value})" for each in holders)


@click.command(name="release")
@click.argument("chosen", nargs=-1, metavar="[ROLE|gpu=N]...")
@namespace_option
def release(chosen: Sequence[str], namespace: str | None) -> None:
    """End the holds of these roles, decode or prefill, or the reservations of these GPUs.

    Without any, all holds and all reservations end. The numbers of workers stay as they are.
    """
    roles, gpus = parse_release(chosen)
    found = connect(namespace)
    is_any = False
    if gpus or not chosen:
        is_any = asyncio.run(_release_gpus(found, gpus))
    if roles or not chosen:
        is_any = _release_roles(found, roles) or is_any
    if not chosen and not is_any:
        click.echo(NOTHING_HELD)


def parse_release(chosen: Sequence[str]) -> tuple[list[Role], frozenset[int]]:
    """Return the roles and the GPUs that are named; raises ConfigError for anything else."""
    known = {role.value: role for role in SCALED_ROLES}
    roles = [known[name] for name in chosen if name in known]
    others = [name for name in chosen if name not in known]
    for name in others:
        if not name.startswith(GPU):
            raise ConfigError(f"release {name}: no such role", hint=nearest(name, [*known, f"{GPU}7"]))
    return roles, frozenset(index for name in others for index in parse_gpus(name))


def _release_roles(found: RunningDeployment, roles: Sequence[Role]) -> bool:
    """End the holds of these roles, or of all for none; print them, and return whether there was any."""
    chosen = roles or list(SCALED_ROLES)
    written = asyncio.run(_end_holds(found, chosen))
    settings = planner_settings(found)
    ended = {role: hold for role in chosen if (hold := written.holds_before.of(role))}
    record_scaling(found, chosen, written)
    for role, hold in ended.items():
        click.echo(f"released {role.value}: it was {hold}")
    for role in chosen:
        if roles and role not in ended:
            click.echo(f"{role.value} is not held")
    if ended and settings:
        click.echo(describe_next_decision(found, settings, written.counts, written.holds, is_decision=False))
    return bool(ended)


async def _release_gpus(found: RunningDeployment, gpus: frozenset[int]) -> bool:
    """End the reservations of these GPUs, or of all for an empty set; return whether any GPU was reserved.

    A GPU that is lent to a program that runs stays lent.
    """

    def without(now: ReservedGpus) -> ReservedGpus:
        lent = {index for index, made in now.by_gpu.items() if made.holder and is_alive(made.holder)}
        return now.without((gpus or frozenset(now.by_gpu)) - lent)

    async with connections.open_store() as store:
        before, after = await change_entries(
            store, found.namespace, RESERVATIONS, ReservedGpus.from_text, without
        )
    for index in sorted(gpus or before.by_gpu):
        made = before.by_gpu.get(index)
        if made and made.holder and index in after.by_gpu:
            click.echo(f"GPU {index} is {reserved_words(made)}: `kill {made.holder.pid}` ends that")
            continue
        if made:
            record_by_hand(found, f"released GPU {index}, it was {reserved_words(made)}")
        click.echo(
            f"released GPU {index}: it was {reserved_words(made)}" if made else f"GPU {index} is not reserved"
        )
    return bool(before.by_gpu)


async def _end_holds(found: RunningDeployment, chosen: Sequence[Role]) -> WrittenCounts:
    async with connections.open_store() as store:
        return await write_counts(store, found.namespace, without_holds(chosen))
