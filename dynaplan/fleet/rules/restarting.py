"""Restarting: what becomes of a worker whose process has ended. It is stopped, restarted later, or failed."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from zlib import crc32

from dynaplan.graph.lifecycle import (
    EXIT_CANNOT_START,
    EXIT_PROGRAM_ENDED,
    OUT_OF_MEMORY_REASON,
    Worker,
    WorkerEvent,
    WorkerState,
)


@dataclass(frozen=True)
class RestartPolicy:
    """The policy by which a crashed worker is started again; all times are in seconds.

    The first restart is at once, the next after ``first_delay_s``, then twice as long each time, up to
    ``max_delay_s``. After more than ``max_restarts`` within ``window_s`` a worker has FAILED. One that was
    ready for ``stable_s`` has its restart count reset. A failed worker is replaced after ``first_retry_s``,
    then after twice as long each time, up to ``max_retry_s``; the replacement fails again at its first crash.
    Where the command itself ended before it answered, ``max_restarts_of_ended`` counts.
    """

    max_restarts: int = 5
    max_restarts_of_ended: int = 2
    window_s: float = 60.0
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    stable_s: float = 60.0
    first_retry_s: float = 30.0
    max_retry_s: float = 300.0

    def restart_delay_s(self, earlier_restarts: int) -> float:
        """Return the delay in seconds before the next restart, after that number of restarts."""
        if earlier_restarts == 0:
            return 0.0
        return float(min(self.max_delay_s, self.first_delay_s * 2 ** min(earlier_restarts - 1, 32)))

    def replacement_delay_s(self, failures: int, name: str) -> float:
        """Return the delay in seconds before a failed worker is replaced, after that number of failures.

        Minus up to 20 % jitter, from a hash of the worker's name: workers that failed together, on a full
        disk say, are not all started in the same second.
        """
        longest = min(self.max_retry_s, self.first_retry_s * 2 ** min(failures, 32))
        return float(longest * (1 - (crc32(f"{name} {failures}".encode()) % 1000) / 5000))


DEFAULT_POLICY = RestartPolicy()

POSSIBLE_KILLERS = "the out-of-memory killer, or somebody's kill -9"
"""Likely causes of a SIGKILL that dynaplan did not send."""


def after_exit(
    worker: Worker,
    exit_code: int | None,
    now_s: float,
    policy: RestartPolicy = DEFAULT_POLICY,
    killer: str = "",
) -> Worker:
    """Return the worker's next state once all its processes are gone.

    ``exit_code``: None if unknown, below 0 for a signal. ``killer`` describes what ended it, where known.

    Draining: STOPPED, whatever the code. ``EXIT_CANNOT_START``: FAILED. Any other exit, even a clean one (its
    lease may have been revoked from outside), is a crash: the worker waits for its restart and keeps its name
    and GPUs, or after too many crashes it has FAILED until its replacement is tried at ``retry_at_s``.
    A worker without a process is returned unchanged, so that an exit reported twice counts once.
    """
    if worker.state is WorkerState.DRAINING:
        return _released(
            worker, WorkerEvent.SESSION_GONE, now_s, f"drained, {exit_reason(exit_code, killer)}"
        )
    if worker.state not in (WorkerState.STARTING, WorkerState.READY):
        return worker
    reason = exit_reason(exit_code, killer)
    if exit_code == EXIT_CANNOT_START:
        return _released(worker, WorkerEvent.GAVE_UP, now_s, f"can never start ({reason})")
    is_stable = worker.state is WorkerState.READY and now_s - worker.since_s >= policy.stable_s
    earlier = () if is_stable else worker.restarts_s
    failures = 0 if is_stable else worker.failures
    recent = sum(now_s - restart_s < policy.window_s for restart_s in earlier)
    has_ended = exit_code == EXIT_PROGRAM_ENDED
    if failures or recent >= (policy.max_restarts_of_ended if has_ended else policy.max_restarts):
        why = f"{reason}, after {recent} restarts within {policy.window_s:g} s"
        failed = _released(worker, WorkerEvent.GAVE_UP, now_s, reason if failures else why)
        retry_at_s = now_s + policy.replacement_delay_s(failures, worker.name)
        return replace(failed, failures=failures + 1, retry_at_s=retry_at_s)
    waiting = replace(
        worker,
        pid=0,
        started_at=0,
        instance_id=0,
        url="",
        restarts_s=(*earlier, now_s)[-32:],
        failures=failures,
        retry_at_s=now_s + policy.restart_delay_s(len(earlier)),
    )
    return waiting.after(WorkerEvent.CRASHED, now_s, reason)


_OUT_OF_MEMORY_LINES = (
    "out of memory",
    "outofmemory",
    "failed to allocate",
    "unable to allocate",
    "no available memory for the cache blocks",
    "less than desired gpu memory utilization",
    "larger than the available kv cache memory",
)
"""What engines write, in lower case, when a model does not fit: CUDA, llama.cpp, vLLM."""


def shows_out_of_memory(last_lines: str) -> bool:
    """Tell whether the last lines of a log say that the memory was not enough."""
    text = last_lines.lower()
    return any(words in text for words in _OUT_OF_MEMORY_LINES)


def after_out_of_memory(worker: Worker, now_s: float) -> Worker:
    """Return the worker as failed for lack of memory: it is not started on the same GPUs again."""
    failed = _released(
        worker, WorkerEvent.GAVE_UP, now_s, f"{OUT_OF_MEMORY_REASON}: {worker.memory_bytes} bytes"
    )
    return replace(failed, failures=worker.failures + 1, retry_at_s=now_s)


def after_process_ended(worker: Worker, now_s: float) -> Worker:
    """Return a worker whose main process has ended, until its exit code and its descendants' end are known.

    A ready one becomes STARTING, without an address, until the caller calls ``after_exit``; its restart count
    is reset here if it was ready for ``stable_s``, since ``after_exit`` no longer sees that.
    """
    if worker.state is not WorkerState.READY:
        return replace(worker, url="") if worker.state is WorkerState.STARTING else worker
    if now_s - worker.since_s >= DEFAULT_POLICY.stable_s:
        worker = replace(worker, restarts_s=(), failures=0)
    return replace(worker, url="").after(WorkerEvent.PROCESS_ENDED, now_s)


def exit_reason(exit_code: int | None, killer: str = "") -> str:
    """Return ``exit code 1``, ``killed by SIGTERM`` or the like, with what is known of the killer."""
    if exit_code == -signal.SIGKILL and not killer:
        killer = POSSIBLE_KILLERS
    return f"{_describe_code(exit_code)}: {killer}" if killer else _describe_code(exit_code)


def describe_oom_kills(kills: int, where: str) -> str:
    """Return the text for that many processes killed for lack of memory; "" for none."""
    if kills <= 0:
        return ""
    processes = "a process" if kills == 1 else f"{kills} processes"
    return (
        f"the kernel's out-of-memory killer ended {processes} of {where} meanwhile. "
        "Let the model use less memory, run fewer workers, or free memory"
    )


def _describe_code(exit_code: int | None) -> str:
    if exit_code is None:
        return "exit code unknown"
    if exit_code == EXIT_PROGRAM_ENDED:
        return "its program ended before it answered"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def _released(worker: Worker, event: WorkerEvent, now_s: float, why: str) -> Worker:
    released = replace(
        worker, pid=0, started_at=0, instance_id=0, url="", gpus=(), gpu_share=1.0, retry_at_s=0.0
    )
    released = replace(released, memory_bytes=0)
    return released.after(event, now_s, why)
