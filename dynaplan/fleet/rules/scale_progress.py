"""The progress of asking for numbers of workers: what is not carried out yet, and what will not be.

Carried out means: the wanted number of each role is ready, none of its workers has failed, and no worker that
left, or is leaving, still has a process, and with it GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dynaplan.graph.lifecycle import Role, Worker, WorkerState

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
        """True when everything that was asked for is so."""
        return not self.missing


def scale_progress(wanted: Mapping[Role, int], workers: Iterable[Worker]) -> ScaleProgress:
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
