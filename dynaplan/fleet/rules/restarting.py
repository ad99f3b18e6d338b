"""Restarting: the next state of a worker whose process has ended, stopped, restarted later, or failed."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from zlib import crc32

from dynaplan.graph.lifecycle import EXIT_NEVER, Worker, WorkerState


@dataclass(frozen=True)
class RestartPolicy:
    """The policy by which a crashed worker is started again; all times are in seconds.

    The first restart is at once, the next after ``first_delay_s``, then twice as long each time, up to
    ``max_delay_s``. More than ``max_restarts`` within ``window_s`` make a worker failed. A worker that was
    ready for ``stable_s`` begins anew. A failed worker is replaced after ``first_retry_s``, then after
    twice as long each time, up to ``max_retry_s``; the replacement fails again at its first crash.
    """

    max_restarts: int = 5
    window_s: float = 60.0
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    stable_s: float = 60.0
    first_retry_s: float = 30.0
    max_retry_s: float = 300.0

    def delay_s(self, earlier_restarts: int) -> float:
        """Return the delay in seconds before the next restart, after that number of restarts."""
        if earlier_restarts == 0:
            return 0.0
        return float(min(self.max_delay_s, self.first_delay_s * 2 ** min(earlier_restarts - 1, 32)))

    def retry_s(self, failures: int, name: str) -> float:
        """Return the delay in seconds before a failed worker is replaced, after that number of failures.

        It is up to a fifth shorter, by a hash of the worker's name: workers that failed together, on a full
        disk say, are not all started in the same second.
        """
        longest = min(self.max_retry_s, self.first_retry_s * 2 ** min(failures, 32))
        return float(longest * (1 - (crc32(f"{name} {failures}".encode()) % 1000) / 5000))


DEFAULT_POLICY = RestartPolicy()

UNKNOWN_KILLER = "the out-of-memory killer, or somebody's kill -9"
"""The possible senders of a SIGKILL that nobody claims."""


def after_exit(
    worker: Worker,
    exit_code: int | None,
    now_s: float,
    policy: RestartPolicy = DEFAULT_POLICY,
    killer: str = "",
) -> Worker:
    """The worker once all its processes are gone; ``exit_code`` None is "not known", below 0 a signal.

    ``killer`` says in words what ended it, where that is known.

    Draining: stopped, whatever the code. ``EXIT_NEVER``: failed. Everything else that was not asked
    for, a clean exit included (its lease may have been revoked from outside), is a crash: it waits for
    its restart and keeps its name and GPUs, or has failed when it crashed too often, until a replacement is
    tried at ``retry_at_s``. A worker that
    had no process to lose is returned as it is, so that an exit reported twice counts once.
    """
    if worker.state is WorkerState.DRAINING:
        return _ended(worker, WorkerState.STOPPED, now_s, f"drained, {exit_reason(exit_code, killer)}")
    if worker.state not in (WorkerState.STARTING, WorkerState.READY):
        return worker
    reason = exit_reason(exit_code, killer)
    if exit_code == EXIT_NEVER:
        return _ended(worker, WorkerState.FAILED, now_s, f"can never start ({reason})")
    is_stable = worker.state is WorkerState.READY and now_s - worker.since_s >= policy.stable_s
    earlier = () if is_stable else worker.restarts_s
    failures = 0 if is_stable else worker.failures
    recent = sum(now_s - restart_s < policy.window_s for restart_s in earlier)
    if failures or recent >= policy.max_restarts:
        why = f"{reason}, after {recent} restarts within {policy.window_s:g} s"
        failed = _ended(worker, WorkerState.FAILED, now_s, reason if failures else why)
        retry_at_s = now_s + policy.retry_s(failures, worker.name)
        return replace(failed, failures=failures + 1, retry_at_s=retry_at_s)
    waiting = replace(
        worker,
        pid=0,
        started_at=0,
        instance_id=0,
        url="",
        restarts_s=(*earlier, now_s)[-32:],
        failures=failures,
        retry_at_s=now_s + policy.delay_s(len(earlier)),
    )
    return waiting.moved(WorkerState.BACKOFF, now_s, reason)


TOO_LITTLE_MEMORY = "it was given too little memory"
"""The beginning of the reason of a worker whose load has failed for want of memory."""

_LACK_OF_MEMORY = (
    "out of memory",
    "outofmemory",
    "failed to allocate",
    "unable to allocate",
    "no available memory for the cache blocks",
    "less than desired gpu memory utilization",
    "larger than the available kv cache memory",
)
"""What engines write, in lower case, when a model does not fit: CUDA, llama.cpp, vLLM."""


def lacks_memory(last_lines: str) -> bool:
    """Tell whether the last lines of a log say that the memory was not enough."""
    text = last_lines.lower()
    return any(words in text for words in _LACK_OF_MEMORY)


def after_too_little_memory(worker: Worker, now_s: float) -> Worker:
    """The worker of a model whose load failed for want of memory: it is not tried in the same place again."""
    failed = _ended(worker, WorkerState.FAILED, now_s, f"{TOO_LITTLE_MEMORY}: {worker.memory_bytes} bytes")
    return replace(failed, failures=worker.failures + 1, retry_at_s=now_s)


def too_little_bytes(worker: Worker) -> int:
    """Return the memory that was too little for a worker's load; 0 for one that has not failed for that."""
    begin, _, rest = worker.reason.partition(f"{TOO_LITTLE_MEMORY}: ")
    number = rest.partition(" ")[0]
    return int(number) if not begin and worker.state is WorkerState.FAILED and number.isdecimal() else 0


def without_process(worker: Worker, now_s: float) -> Worker:
    """Return a worker whose process has ended, while its exit code and the end of its session are waited for.

    It is ready no more, and has no address. One that was stable for long enough begins anew, as after
    ``after_exit``, which follows.
    """
    if worker.state is not WorkerState.READY:
        return replace(worker, url="") if worker.state is WorkerState.STARTING else worker
    if now_s - worker.since_s >= DEFAULT_POLICY.stable_s:
        worker = replace(worker, restarts_s=(), failures=0)
    return replace(worker, url="").moved(WorkerState.STARTING, now_s, "its process has ended")


def exit_reason(exit_code: int | None, killer: str = "") -> str:
    """The exit code in words: ``exit code 1``, ``killed by SIGTERM``, with what is known of the killer.

    Only the kernel's out-of-memory killer and a person or program with ``kill -9`` send SIGKILL unasked.
    """
    if exit_code == -signal.SIGKILL and not killer:
        killer = UNKNOWN_KILLER
    return f"{_code_in_words(exit_code)}: {killer}" if killer else _code_in_words(exit_code)


def out_of_memory(kills: int, where: str) -> str:
    """Name the out-of-memory killer as what ended a process; empty when it has ended none meanwhile."""
    if kills <= 0:
        return ""
    processes = "a process" if kills == 1 else f"{kills} processes"
    return (
        f"the kernel's out-of-memory killer ended {processes} of {where} meanwhile. "
        "Let the model use less memory, run fewer workers, or free some"
    )


def _code_in_words(exit_code: int | None) -> str:
    if exit_code is None:
        return "exit code unknown"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def _ended(worker: Worker, state: WorkerState, now_s: float, why: str) -> Worker:
    free = replace(worker, pid=0, started_at=0, instance_id=0, url="", gpus=(), gpu_share=1.0, retry_at_s=0.0)
    free = replace(free, memory_bytes=0)
    return free.moved(state, now_s, why)
