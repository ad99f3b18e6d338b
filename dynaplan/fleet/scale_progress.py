"""Waiting until numbers of workers are carried out, or until it is certain that they will not be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dynaplan.contract.store_keys import DesiredCounts, planner_prefix
from dynaplan.fleet.deployments import RunningDeployment
from dynaplan.fleet.rules.statefile import fleet_of
from dynaplan.fleet.statefile_store import StatefileStore
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.process import process_table
from dynaplan.process.heartbeats import PLUGIN_HEARTBEAT, SERVE_HEARTBEAT, HeartbeatFiles
from dynaplan.store.port import KeyValueStore
from dynaplan.util.errors import (
    DeploymentError,
    PermanentError,
    StatefileCorrupt,
    StoreUnavailable,
    TemporaryError,
)

_UNDER_WAY = (WorkerState.STARTING, WorkerState.BACKOFF, WorkerState.DRAINING)


@dataclass(frozen=True)
class ScaleProgress:
    """The state of one wish for numbers of workers.

    ``missing`` are phrases about what is not carried out, empty when all is; ``failed`` are the workers that
    have failed; ``is_settled`` is true when nothing is under way: only failed workers are in the way.
    ``under_way`` are the states of workers that will still change by themselves.
    """

    missing: tuple[str, ...]
    failed: tuple[Worker, ...]
    is_settled: bool
    under_way: frozenset[WorkerState] = frozenset()

    @property
    def is_carried_out(self) -> bool:
        return not self.missing


def measure_progress(wanted: Mapping[Role, int], workers: Iterable[Worker]) -> ScaleProgress:
    """Compare the wanted number of workers of each role with the workers that there are."""
    missing: list[str] = []
    failed: list[Worker] = []
    is_settled = True
    under_way: set[WorkerState] = set()
    for role, number in wanted.items():
        own = [worker for worker in workers if worker.role is role]
        ready = sum(worker.state is WorkerState.READY for worker in own)
        others = [worker for worker in own if worker.state is not WorkerState.READY]
        failed += [worker for worker in others if worker.state is WorkerState.FAILED]
        if ready != number or others:
            phrases = [f"{ready} of {number} {role.value} workers ready", *map(_phrase, others)]
            missing.append(", ".join(phrases))
        under_way |= {worker.state for worker in own} & set(_UNDER_WAY)
        present = sum(worker.state is not WorkerState.DRAINING for worker in own)
        is_settled &= present == number and not any(worker.state in _UNDER_WAY for worker in own)
    return ScaleProgress(tuple(missing), tuple(failed), is_settled, frozenset(under_way))


def _phrase(worker: Worker) -> str:
    if worker.state is not WorkerState.DRAINING or not worker.gpus:
        return f"{worker.name} {worker.state.value}"
    gpus = ",".join(map(str, worker.gpus))
    return f"{worker.name} draining, with GPU {gpus}"


PROGRESS_POLL_S = 0.1
"""Time between two looks, in seconds."""

GIVE_UP_S = 45.0
"""Silence of the fleet plugin or of ``serve``, in seconds, after which waiting is useless."""


class DecisionSuperseded(PermanentError):
    """Another decision has asked for other numbers before this one was carried out."""


@dataclass(frozen=True)
class ScaleRequest:
    """Numbers of workers that were asked for, as the decision with that id.

    With ``is_for_others`` a program of the user's carries it out: its acknowledgement is all that is known.
    """

    decision_id: int
    wanted: Mapping[Role, int]
    is_for_others: bool = False


async def wait_carried_out(
    found: RunningDeployment,
    store: KeyValueStore,
    request: ScaleRequest,
    timeout_s: float,
    watch: Callable[[ScaleProgress], None] = lambda _: None,
) -> None:
    """Return when the request is carried out: the numbers are ready, and no drained worker holds a GPU.

    ``watch`` gets the progress at every poll.

    Raises DecisionSuperseded when another decision has taken its place, PermanentError when workers have
    failed, or ``serve`` or its fleet plugin does not answer; TemporaryError, with what is missing, after
    ``timeout_s`` seconds.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        check_alive(found)
        counts = await _counts(store, found.namespace)
        progress = None if request.is_for_others else _progress(found, request.wanted)
        if progress:
            watch(progress)
        if counts and request.is_for_others and counts.scaled_decision_id >= request.decision_id:
            return
        if counts and progress and counts.scaled_decision_id >= request.decision_id:
            if progress.is_carried_out:
                return
            if progress.is_settled:
                raise PermanentError("; ".join(progress.missing), hint=_ways_out(progress, request.wanted))
        if counts and counts.decision_id > request.decision_id and not _asks_for(counts, request.wanted):
            raise DecisionSuperseded(
                f"overtaken by decision {counts.decision_id}: {_numbers(counts, request.wanted)}",
                hint="The planner, or somebody else, has asked for other numbers; `dynaplan why` shows it.",
            )
        if time.monotonic() > deadline_s:
            missing = "; ".join(progress.missing) if progress and progress.missing else "not acknowledged"
            raise TemporaryError(
                f"not carried out within {timeout_s:g} s: {missing}",
                hint="It goes on; `dynaplan status` shows how far it is.",
            )
        await asyncio.sleep(PROGRESS_POLL_S)


def check_alive(found: RunningDeployment) -> None:
    """Raise PermanentError unless ``serve`` and its fleet plugin go on, DeploymentError when it has ended."""
    if not process_table.is_alive(found.arbiter):
        raise DeploymentError(f"{found.namespace} has ended", hint="Start it with `dynaplan serve GRAPH`.")
    heartbeats = HeartbeatFiles.of(found.runtime_dir)
    for name, words in ((SERVE_HEARTBEAT, "`dynaplan serve`"), (PLUGIN_HEARTBEAT, "the fleet plugin")):
        heartbeat = heartbeats.read(name)
        if heartbeat and heartbeat.silent_s > GIVE_UP_S:
            serve, silence = (
                heartbeats.read(SERVE_HEARTBEAT) or heartbeat,
                f"has not answered for {heartbeat.silent_s:.0f} s",
            )
            raise PermanentError(
                f"{words} (pid {heartbeat.process.pid}) {silence}: nothing is scaled",
                hint=f"If serve was stopped, `kill -CONT {serve.process.pid}` lets it go on; "
                "else `dynaplan stop` ends it.",
            )


def _progress(found: RunningDeployment, wanted: Mapping[Role, int]) -> ScaleProgress | None:
    """The progress by the statefile; None while it cannot be read."""
    try:
        document = StatefileStore(found.statefile).read()
    except StatefileCorrupt:
        return None
    return measure_progress(wanted, fleet_of(document)) if document else None


async def _counts(store: KeyValueStore, namespace: str) -> DesiredCounts | None:
    """The desired counts; None while the store does not answer."""
    try:
        items = await store.list(planner_prefix(namespace))
    except StoreUnavailable:
        return None
    return DesiredCounts.from_keys(namespace, {item.key: item.value for item in items})


def _asks_for(counts: DesiredCounts, wanted: Mapping[Role, int]) -> bool:
    return all(counts.of(role) == number for role, number in wanted.items())


def _numbers(counts: DesiredCounts, wanted: Mapping[Role, int]) -> str:
    return ", ".join(f"{role.value}={counts.of(role)}" for role in wanted)


def _ways_out(progress: ScaleProgress, wanted: Mapping[Role, int]) -> str:
    """The reasons of the failed workers, and the command that tries them again."""
    lines = [f"{worker.name} has failed: {worker.reason}" for worker in progress.failed]
    numbers = " ".join(f"{role.value}={number}" for role, number in wanted.items())
    again = f"`dynaplan scale {numbers}` tries again at once; `dynaplan logs NAME` shows more."
    return "\n  ".join([*lines, again])
