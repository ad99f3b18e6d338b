"""``dynaplan run --gpus 1 -- python train.py``: a program of yours on GPUs that the deployment lends.

1. *Ask.* The cheapest GPUs (``fleet/rules/lending.py``) are chosen and reserved in one transaction, so that
   two who ask at once get different ones. A GPU that no deployment has is claimed instead.
2. *Wait.* Workers on them are drained by the fleet plugin, as for ``dynaplan reserve``; then the driver must
   say that the memory is free.
3. *Run.* The command has a session of its own, and ends with this process
   (``process/foreground_command.py``).
4. *Give back.* The reservation is a loan: it ends with this process, which the fleet plugin sees where it is
   killed. The GPU is handed on when the driver says that its memory is free.

While the command runs its GPUs are claimed as soon as the deployment's own claims are gone: one that starts
meanwhile keeps off them.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import click

from dynaplan.cli.by_hand import record_by_hand
from dynaplan.cli.options import namespace_option
from dynaplan.cli.reserve import check_decode_left, wait_until_free
from dynaplan.cli.running_deployment import connected, standings_of
from dynaplan.cli.scale_args import user_name
from dynaplan.cli.scale_counts import change_entries
from dynaplan.cli.timing import WORKERS_POLL_S
from dynaplan.contract.gpus import busy_gpus
from dynaplan.contract.holds import MAX_HOLD_S, RESERVATIONS, Hold, ReservedGpus, reserved_words
from dynaplan.contract.model_keys import NO_DEMAND, reports_in
from dynaplan.fleet.gpu_devices import available_gpus, uses_reader
from dynaplan.fleet.rules.lending import LendableGpu, choose_lent
from dynaplan.fleet.rules.statefile import inventory_of
from dynaplan.graph.lifecycle import COUNTS, HOLDS_GPUS
from dynaplan.process import process_table
from dynaplan.process.foreground_command import ForegroundCommand
from dynaplan.process.signals import run_interruptible
from dynaplan.store import connections
from dynaplan.util.amounts import bytes_of, seconds_of, unit_missing
from dynaplan.util.durations import clock, local_time
from dynaplan.util.errors import (
    CapacityError,
    ConfigError,
    DeploymentError,
    DynaplanError,
    StoreUnavailable,
    TemporaryError,
)
from dynaplan.util.masking import mask_secrets
from dynaplan.util.progress import ProgressLine

if TYPE_CHECKING:
    from dynaplan.contract.gpus import Gpu
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.fleet.gpu_claims import NodeClaims

CLAIM_POLL_S = 2.0
"""Seconds between two attempts to claim GPUs whose deployment may have ended."""

SHOWN_COMMAND_CHARS = 60


@dataclass(frozen=True)
class LoanRequest:
    """What a person asks for: so many GPUs, each of so much memory, for a command.

    ``wait_s`` bounds the time until they are there: None waits for workers to leave, and for nothing else.
    """

    gpus: int
    memory_bytes: int
    wait_s: float | None
    is_confirmed: bool
    made: Hold


@click.command(name="run", context_settings={"allow_interspersed_args": False})
@click.option("--gpus", type=click.IntRange(1, 1024), default=1, show_default=True, help="How many.")
@click.option("--memory", metavar="SIZE", help="The least memory of each, as 20GB.")
@click.option(
    "--wait", metavar="TIME", help="Wait so long for them, 90s, 10m, 2h; default: for workers to leave."
)
@click.option("--at", metavar="HH:MM", help="Begin at that time, today or tomorrow.")
@click.option("--for", "duration", metavar="TIME", help="Ask the command to end after 90s, 10m, 2h or 1d.")
@click.option(
    "--grace", metavar="TIME", default="30s", show_default=True, help="From being asked to being killed."
)
@click.option("--yes", is_flag=True, help="Allow what leaves no GPU for a decode worker.")
@namespace_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND [ARG]...")
def command(
    gpus: int,
    memory: str | None,
    wait: str | None,
    at: str | None,
    duration: str | None,
    grace: str,
    yes: bool,
    namespace: str | None,
    command: Sequence[str],
) -> None:
    """Run a command on GPUs of its own: workers leave them first, after their requests.

    The command starts when the driver says that the memory is free, with CUDA_VISIBLE_DEVICES, in a session
    of its own; output, signals and exit code are passed through. When it ends, or is killed, or this is, or
    the terminal goes, nothing of it stays, and the GPUs come back.
    """
    environment = dict(os.environ)
    check_program(command[0])
    least_bytes = parse_memory(memory) if memory else 0
    wait_s = parse_time("--wait", wait) if wait else None
    limit_s = parse_time("--for", duration) if duration else None
    grace_s = parse_time("--grace", grace)
    made = Hold(
        since_s=round(time.time(), 3),
        by=user_name(),
        uid=os.getuid(),
        pid=os.getpid(),
        host=socket.gethostname()[:100],
        command=shown_command(command),
        holder=process_table.identity_of(os.getpid()),
    )
    if at:
        run_interruptible(_wait_for_the_time(moment_of(at, datetime.now())))
    loan = Loan(_deployment(namespace), LoanRequest(gpus, least_bytes, wait_s, yes, made))
    with loan.kept():
        run_interruptible(loan.obtain())
        code = loan.run(command, environment, limit_s, grace_s)
    sys.exit(code)


class Loan:
    """GPUs on loan from a deployment, or from the box where none runs: obtained, used, given back."""

    def __init__(self, found: RunningDeployment | None, request: LoanRequest) -> None:
        from dynaplan.fleet.gpu_claims import NodeClaims

        self._found = found
        self._request = request
        assert request.made.holder
        namespace = found.namespace if found else "run"
        self._claims: NodeClaims = NodeClaims(request.made.holder, namespace, worker=request.made.command)
        self._gpus: tuple[Gpu, ...] = ()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Give back inside of a block, whatever ends it, what was obtained in it."""
        try:
            yield
        finally:
            # What cannot be given back now ends with this process.
            with suppress(DynaplanError):
                run_interruptible(self._write({}))
            with suppress(DynaplanError):
                self._claims.release([gpu.uuid for gpu in self._gpus])
            if self._gpus:
                _say(f"{_names(self._gpus)} given back")

    async def obtain(self) -> None:
        """Return when the GPUs are ours and empty; raises CapacityError, TemporaryError after the time.

        Where the deployment ends meanwhile its GPUs are those of whoever claims them.
        """
        deadline_s = time.monotonic() + (self._request.wait_s or 0.0)
        while True:
            try:
                return await self._obtain_until(deadline_s)
            except DynaplanError as error:
                if self._found is None:
                    raise
                if process_table.is_alive(self._found.arbiter):
                    is_passing = isinstance(error, StoreUnavailable | DeploymentError)
                    if not is_passing or time.monotonic() >= deadline_s:
                        raise
                    await asyncio.sleep(WORKERS_POLL_S)  # it is ending, or being started again
                    continue
                _say(f"the deployment {self._found.namespace} has ended; its GPUs are free")
                self._found, self._gpus = None, ()

    async def _obtain_until(self, deadline_s: float) -> None:
        wait_s = self._request.wait_s
        with ProgressLine() as line:
            while True:
                try:
                    chosen = await self._reserve()
                    break
                except CapacityError as error:
                    if wait_s is None:
                        raise
                    if time.monotonic() >= deadline_s:
                        raise TemporaryError(f"not within {clock(wait_s)}: {error.args[0]}") from None
                    line.show(f"waiting: {' '.join(error.args[0].split())}", "waiting for GPUs")
                    await asyncio.sleep(WORKERS_POLL_S)
        leaving = [worker.name for each in chosen for worker in each.workers]
        if leaving:
            _say(f"{_names(self._gpus)}: {', '.join(leaving)} leaves after its requests")
        left_s = None if wait_s is None else max(0.0, deadline_s - time.monotonic())
        if self._found and (lent := self._of_deployment()):
            with connected(self._found):
                hint = f"{_names(lent)} is given back, and nothing was run; `--wait TIME` waits longer."
                await wait_until_free(self._found, [gpu.index for gpu in lent], left_s, hint)

    async def _reserve(self) -> tuple[LendableGpu, ...]:
        from dynaplan.fleet.deployments import find_deployment

        chosen: tuple[LendableGpu, ...] = ()
        if self._found:
            self._found = find_deployment(self._found.namespace)
        with suppress(DynaplanError):  # of an attempt before this one
            self._claims.release([gpu.uuid for gpu in self._gpus])
        request, box = self._request, await asyncio.to_thread(_lendable_gpus, self._found)
        box = await _with_models(self._found, box)

        def change(now: ReservedGpus) -> ReservedGpus:
            nonlocal chosen
            now = self._those_of_others(now.without_ended(process_table.is_alive))
            chosen = choose_lent(
                [_unless_reserved(each, now.by_gpu) for each in box], request.gpus, request.memory_bytes
            )
            lent = [each.gpu.index for each in chosen if self._is_of_deployment(each.gpu)]
            if self._found and lent and not request.is_confirmed:
                left = len(inventory_of(self._found.document)) - len({*lent, *now.by_gpu})
                check_decode_left(left, self._found.workers)
            return now.with_gpus(dict.fromkeys(lent, request.made))

        if self._found:
            with connected(self._found):
                async with connections.open_store() as store:
                    await change_entries(
                        store, self._found.namespace, RESERVATIONS, ReservedGpus.from_text, change
                    )
        else:
            change(ReservedGpus())
        others = [each.gpu.uuid for each in chosen if not self._is_of_deployment(each.gpu)]
        if set(others) - self._claims.claim(others):
            await self._write({})
            raise CapacityError("a GPU was claimed by somebody else a moment ago", hint="Try again.")
        self._gpus = tuple(each.gpu for each in chosen)
        if self._found and (lent := self._of_deployment()):
            record_by_hand(self._found, f"{_names(lent)} {reserved_words(request.made)}")
        return chosen

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], limit_s: float | None, grace_s: float
    ) -> int:
        """Run the command to its end, and return its exit code."""
        mask = ",".join(gpu.uuid for gpu in self._gpus)
        own = {"CUDA_VISIBLE_DEVICES": mask, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        program = ForegroundCommand(command, {**environment, **own})
        ending = ""
        if limit_s is not None:
            end = local_time(time.time() + limit_s)
            ending = f"; it is asked to end at {end} (SIGTERM), and killed {clock(grace_s)} later"
        _say(f"{_names(self._gpus)}: started, CUDA_VISIBLE_DEVICES={mask}{ending}")
        return asyncio.run(self._attend(program, limit_s, grace_s))

    async def _attend(self, program: ForegroundCommand, limit_s: float | None, grace_s: float) -> int:
        """Wait for the command's end, end it when its time is over, and keep its GPUs claimed meanwhile."""
        tasks = [asyncio.create_task(self._keep_claimed(), name="claims GPUs")]
        if limit_s is not None:
            tasks.append(asyncio.create_task(self._end_after(program, limit_s, grace_s), name="ends it"))
        try:
            return await program.wait(kill_after_hangup_s=grace_s)
        finally:
            for task in tasks:
                task.cancel()

    async def _end_after(self, program: ForegroundCommand, limit_s: float, grace_s: float) -> None:
        end_s = time.time() + limit_s
        made = replace(self._request.made, until_s=end_s, until=local_time(end_s))
        with suppress(DynaplanError):
            await self._write({gpu.index: made for gpu in self._of_deployment()})
        await asyncio.sleep(end_s - time.time())
        _say("its time is over: it is asked to end")
        program.send(signal.SIGTERM)
        await asyncio.sleep(grace_s)
        _say("it has not ended: it is killed")
        program.kill()

    async def _keep_claimed(self) -> None:
        while True:
            with suppress(DynaplanError):
                self._claims.claim([gpu.uuid for gpu in self._gpus])
            await asyncio.sleep(CLAIM_POLL_S)

    async def _write(self, made: Mapping[int, Hold]) -> None:
        """Put these in the place of this process's loans."""

        def change(now: ReservedGpus) -> ReservedGpus:
            return self._those_of_others(now).with_gpus(made)

        if self._found and process_table.is_alive(self._found.arbiter):
            with connected(self._found):
                async with connections.open_store() as store:
                    await change_entries(
                        store, self._found.namespace, RESERVATIONS, ReservedGpus.from_text, change
                    )

    def _those_of_others(self, now: ReservedGpus) -> ReservedGpus:
        holder = self._request.made.holder
        return now.without(frozenset(index for index, each in now.by_gpu.items() if each.holder == holder))

    def _is_of_deployment(self, gpu: Gpu) -> bool:
        return self._found is not None and gpu in inventory_of(self._found.document)

    def _of_deployment(self) -> tuple[Gpu, ...]:
        return tuple(filter(self._is_of_deployment, self._gpus))


def _deployment(namespace: str | None) -> RunningDeployment | None:
    """Return the deployment that lends; None where none runs, and none is named."""
    from dynaplan.fleet.deployments import find_deployment, find_deployments

    try:
        find_deployments(namespace)
    except DeploymentError:
        if namespace:
            raise
        return None
    return find_deployment(namespace)


def box_gpus(found: RunningDeployment | None) -> tuple[Gpu, ...]:
    """Return the GPUs of the box that may be seen from here; simulated ones are those of the deployment."""
    gpus, is_simulated = available_gpus(None)
    return inventory_of(found.document) if found and is_simulated else gpus


def _lendable_gpus(found: RunningDeployment | None) -> list[LendableGpu]:
    """Return the GPUs of the box, with the workers on each, and why others have some."""
    from dynaplan.fleet.gpu_claims import NodeClaims
    from dynaplan.fleet.plugin.gpu_availability import GpuClaims

    gpus = box_gpus(found)
    arbiter = found.arbiter if found else process_table.identity_of(os.getpid())
    claims = NodeClaims(arbiter, found.namespace if found else "run")
    workers = found.workers if found else ()
    held = {index for each in workers if each.state in HOLDS_GPUS for index in each.gpus}
    busy = {index: why for index, why in busy_gpus(gpus, uses_reader(gpus)()).items() if index not in held}
    apart = standings_of(found).apart if found else {}
    taken = {**busy, **GpuClaims(claims, gpus).held_by_others(), **apart}
    return [
        LendableGpu(
            gpu,
            tuple(each for each in workers if gpu.index in each.gpus and each.state in COUNTS & HOLDS_GPUS),
            taken.get(gpu.index, ""),
        )
        for gpu in gpus
    ]


async def _with_models(found: RunningDeployment | None, gpus: list[LendableGpu]) -> list[LendableGpu]:
    """Return them with what the store knows of the models on each that are loaded on request."""
    from dynaplan.cli.status_document import read_store

    if found is None or not any(each.workers for each in gpus):
        return gpus
    with connected(found):
        async with connections.open_store() as store:
            answers = await read_store(store, found.namespace)
    reports = {each.component: (name, each) for name, each in reports_in(answers.fleet).items()}
    known = []
    for each in gpus:
        models = [reports[worker.component] for worker in each.workers if worker.component in reports]
        demands = [answers.demand.get(name, NO_DEMAND) for name, _ in models]
        known.append(
            replace(
                each,
                is_on_request=len(models) == len(each.workers) > 0,
                is_pinned=any(report.is_pinned for _, report in models),
                in_flight=sum(demand.in_flight + demand.waiting for demand in demands),
                last_use_unix_s=max((demand.last_use_unix_s for demand in demands), default=0.0),
            )
        )
    return known


def _unless_reserved(gpu: LendableGpu, reserved: Mapping[int, Hold]) -> LendableGpu:
    made = reserved.get(gpu.gpu.index)
    return replace(gpu, taken=reserved_words(made)) if made else gpu


async def _wait_for_the_time(moment: datetime) -> None:
    _say(f"it begins at {moment:%Y-%m-%d %H:%M}; until then nobody gives up a GPU for it")
    with ProgressLine() as line:
        while (left_s := (moment - datetime.now()).total_seconds()) > 0:
            line.show(f"begins in {clock(left_s)}")
            await asyncio.sleep(min(left_s, 1.0))


def moment_of(text: str, now: datetime) -> datetime:
    """Return the next moment at which a clock shows ``22:00``; raises ConfigError for no time of a day."""
    try:
        hour, _, minute = text.partition(":")
        moment = now.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
    except ValueError:
        raise ConfigError(f"--at {text!r}: no time of a day", hint="For example 22:00.") from None
    return moment if moment > now else moment + timedelta(days=1)


def parse_time(option: str, text: str) -> float:
    """Return the seconds that ``2h`` says; raises ConfigError with examples."""
    seconds = seconds_of(text)
    if not seconds or seconds > MAX_HOLD_S:
        raise ConfigError(
            f"{option} {text}: expected a time of up to a year", hint="For example 90s, 10m, 2h or 1d."
        )
    return float(seconds)


def parse_memory(text: str) -> int:
    """Return the bytes that ``20GB`` says; raises ConfigError for no amount of memory."""
    size_bytes = bytes_of(text)
    if size_bytes is None or (meant := unit_missing(size_bytes)):
        hint = f"--memory {meant}?" if size_bytes is not None else "For example 20GB."
        raise ConfigError(f"--memory {text}: expected an amount of memory", hint=hint)
    return size_bytes


def check_program(program: str) -> None:
    """Raise ConfigError for a program that is not there, before any worker leaves for it."""
    if shutil.which(program) is None:
        raise ConfigError(
            f"there is no program {program!r}",
            hint="Name one on the PATH, or its path, behind `--`. A graph or models: `dynaplan serve`.",
        )


def shown_command(command: Sequence[str]) -> str:
    """Return the command as others see it: short, printable and without secrets."""
    masked = mask_secrets({"command": list(command)})["command"]
    text = "".join(each if each.isprintable() else " " for each in shlex.join(masked))
    return text if len(text) <= SHOWN_COMMAND_CHARS else f"{text[: SHOWN_COMMAND_CHARS - 3]}..."


def _names(gpus: Sequence[Gpu]) -> str:
    return f"GPU {','.join(str(gpu.index) for gpu in gpus)}"


def _say(line: str) -> None:
    """Tell the person; standard output is the command's alone."""
    with suppress(OSError):  # the terminal has gone
        click.echo(f"dynaplan run: {line}", err=True)
