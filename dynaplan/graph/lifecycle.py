"""The workers of one deployment and the life each of them leads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from dynaplan.util.errors import IllegalTransition


class Role(Enum):
    """The purpose of a service. Only ``PREFILL`` and ``DECODE`` are scaled by the planner.

    An aggregated worker has the role ``DECODE``: it is scaled by the same signal, KV usage.
    """

    FRONTEND = "frontend"
    DECODE = "decode"
    PREFILL = "prefill"
    PLANNER = "planner"
    SERVICE = "service"


class WorkerState(Enum):
    """A stage in a worker's life; ``LIFECYCLE`` has what moves it to the next."""

    STARTING = "starting"
    """Watcher added, or about to be; not registered yet."""
    READY = "ready"
    """Registered: it gets requests."""
    DRAINING = "draining"
    """Told to leave: gets no new requests, finishes the ones it holds. Never restarted."""
    BACKOFF = "backoff"
    """Crashed; restarted when its delay is over. Keeps its GPUs."""
    FAILED = "failed"
    """Crashed too often, or can never start. Holds no GPU; its entry has the reason."""
    STOPPED = "stopped"
    """Gone, with all processes of its session. Its entry is removed, its GPUs are free."""


class WorkerEvent(Enum):
    """What moves a worker to its next state; the value is the reason where no better one is given."""

    REGISTERED = "registered"
    UNREGISTERED = "its registration is gone"
    PROCESS_ENDED = "its process has ended"
    """Unasked, and its exit code or something in its session is still waited for."""
    CRASHED = "it has crashed"
    """The same, with its whole session."""
    GAVE_UP = "it has failed"
    """It has crashed too often, can never start, or had too little memory."""
    DELAY_OVER = ""
    """It is started again; the reason is still that of its crash."""
    TOLD_TO_LEAVE = "it was told to leave"
    SESSION_GONE = "it has left"


LIFECYCLE: Mapping[WorkerState, Mapping[WorkerEvent, WorkerState]] = {
    WorkerState.STARTING: {
        WorkerEvent.REGISTERED: WorkerState.READY,
        WorkerEvent.TOLD_TO_LEAVE: WorkerState.DRAINING,
        WorkerEvent.CRASHED: WorkerState.BACKOFF,
        WorkerEvent.GAVE_UP: WorkerState.FAILED,
    },
    WorkerState.READY: {
        WorkerEvent.UNREGISTERED: WorkerState.STARTING,
        WorkerEvent.PROCESS_ENDED: WorkerState.STARTING,
        WorkerEvent.TOLD_TO_LEAVE: WorkerState.DRAINING,
        WorkerEvent.CRASHED: WorkerState.BACKOFF,
        WorkerEvent.GAVE_UP: WorkerState.FAILED,
    },
    WorkerState.DRAINING: {WorkerEvent.SESSION_GONE: WorkerState.STOPPED},
    WorkerState.BACKOFF: {WorkerEvent.DELAY_OVER: WorkerState.STARTING},
    WorkerState.FAILED: {WorkerEvent.TOLD_TO_LEAVE: WorkerState.STOPPED},
    WorkerState.STOPPED: {},
}
"""Every move that there is; an event that a state has no row for is a fault of ours.

What may not stand here: a way from DRAINING back to READY. Routers that were told that a worker leaves choose
it no more, and its GPUs may be promised to another. Nor TOLD_TO_LEAVE in BACKOFF: it has no process and holds
no request, so it is removed. Nor a way from FAILED to STARTING: another worker takes its place.
"""


@dataclass(frozen=True)
class Worker:
    """One worker: one watcher, one process, and the GPUs that are its own.

    ``name`` is the watcher's name, ``{namespace}_{component}`` or ``{namespace}_{component}_{n}``.
    ``gpus`` are indices into the box's inventory; ``gpu_share`` is the part of each that it holds
    (1.0 unless fractional). ``memory_bytes`` is the memory of each that it was given, where workers of
    several models share them; 0 where it has them whole. ``pid`` is 0 while it has no process; ``started_at``
    is the process's start time in clock ticks since boot (field 22 of ``/proc/<pid>/stat``), which makes the
    pid unmistakable. ``url`` is the address that its process was registered with, empty before that.
    ``since_s`` and ``retry_at_s`` are on the monotonic clock of the boot; ``retry_at_s`` is 0 for a failed
    worker that can never start. ``failures`` is how often it, or the worker that it replaces, has failed in a
    row.
    """

    name: str
    component: str
    role: Role
    state: WorkerState = WorkerState.STARTING
    gpus: tuple[int, ...] = ()
    gpu_share: float = 1.0
    memory_bytes: int = 0
    pid: int = 0
    started_at: int = 0
    instance_id: int = 0
    url: str = ""
    since_s: float = 0.0
    restarts_s: tuple[float, ...] = ()
    failures: int = 0
    retry_at_s: float = 0.0
    reason: str = ""
    history: tuple[str, ...] = field(default=(), compare=False)

    @property
    def process(self) -> tuple[str, int]:
        """The worker's name and pid, which tell its process from a later one of the same worker."""
        return self.name, self.pid

    def after(self, event: WorkerEvent, now_s: float, why: str = "") -> Worker:
        """Return the worker in the state that the event leads to.

        Raises IllegalTransition, with the worker's history, for an event that its state does not allow.
        """
        why = why or event.value
        state = LIFECYCLE[self.state].get(event)
        if state is None:
            told = "".join(f"\n  {line}" for line in self.history)
            raise IllegalTransition(f"{self.name}: {event.name} while it is {self.state.value} ({why}){told}")
        story = (*self.history[-15:], f"{now_s:.3f} {self.state.value} -> {state.value}: {why}")
        return replace(self, state=state, since_s=now_s, reason=why or self.reason, history=story)

    @property
    def gpu_request(self) -> float:
        """The ``resources.gpu`` that the worker was given: a whole number, or a fraction of one GPU."""
        return self.gpu_share if self.gpus and self.gpu_share < 1 else len(self.gpus)

    @property
    def index(self) -> int:
        """0 for the base worker ``{namespace}_{component}``, n for ``..._{n}``."""
        _, separator, suffix = self.name.rpartition(f"_{self.component}")
        is_numbered = separator and suffix.startswith("_") and suffix[1:].isdecimal()
        return int(suffix[1:]) if is_numbered else 0

    @property
    def failed_memory_bytes(self) -> int:
        """The memory with which its load failed; 0 if it has not failed for lack of memory."""
        begin, _, rest = self.reason.partition(f"{OUT_OF_MEMORY_REASON}: ")
        number = rest.partition(" ")[0]
        return int(number) if not begin and self.state is WorkerState.FAILED and number.isdecimal() else 0

    @property
    def last_lines(self) -> str:
        """The last lines of its log, once it has failed: those of its engine, where they are there."""
        lines = self.reason.partition("\n")[2] if self.state is WorkerState.FAILED else ""
        return lines.rpartition(f"{LAST_LINES_FOLLOW}\n")[2]


OUT_OF_MEMORY_REASON = "it was given too little memory"
"""The beginning of the ``reason`` of a worker that ran out of memory; ``failed_memory_bytes`` parses it."""

LAST_LINES_FOLLOW = "its last lines:"
"""What stands in a worker's log before the last lines of its engine."""


def worker_name(namespace: str, component: str, index: int) -> str:
    """Return the name of a component's worker and its watcher; the base worker, index 0, has no number."""
    base = f"{namespace}_{component}" if namespace else component
    return f"{base}_{index}" if index else base


EXIT_CANNOT_START = 78
"""The exit code (``EX_CONFIG``) of a worker that can never start: it is not tried again."""

EXIT_PROGRAM_ENDED = 76
"""The exit code of a worker whose command ended by itself before it answered: a restart seldom helps."""

HOLDS_GPUS = frozenset({WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING, WorkerState.BACKOFF})
"""The states in which a worker's GPUs are its own."""

COUNTS = frozenset({WorkerState.STARTING, WorkerState.READY, WorkerState.BACKOFF, WorkerState.FAILED})
"""The states that count towards the desired number of a component: everything but leaving and gone."""
