"""Termination: how processes of workers end, asked to, by themselves or by force, and when they are gone.

A worker that is to leave passes these steps:

1. its lease is revoked (decode), so that routers send it nothing more, or it gets SIGTERM (all others);
2. a decode worker gets SIGTERM, too, when it has not left after ``REVOKED_REACT_S``, or the store is away;
3. at its drain deadline, and ``KILL_GRACE_S``, the session is killed.

A worker that hangs is killed at once. Whatever ended it, it is gone when its whole session is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from signal import SIGKILL, SIGTERM

from dynaplan.fleet.deployments import tail
from dynaplan.fleet.launch import CurrentLaunch, Launch
from dynaplan.fleet.plugin.ports import FleetPorts
from dynaplan.fleet.plugin.stall_detection import HealthPoll, StallDetector
from dynaplan.fleet.plugin.store_link import StoreLink
from dynaplan.fleet.rules.observing import Exit, hung, suspects
from dynaplan.fleet.rules.restarting import describe_oom_kills
from dynaplan.fleet.runtime_dir import remove_files_of
from dynaplan.graph.lifecycle import Role, Worker, WorkerState

EXIT_CODE_TIMEOUT_S = 0.9
"""Time for which an exit code is waited for: circus reports it a moment after the process is gone, on a busy
machine half a second."""

REVOKED_REACT_S = 3.0
"""Time after which a worker whose lease was revoked is also sent SIGTERM: it may not have seen that."""

LOADING_LEAVE_S = 10.0
"""Longest time to leave for a worker that was never seen registered: no request is lost with it."""

KILL_GRACE_S = 2.0
"""Time by which a worker may exceed its own drain deadline before it is killed."""

PLANNER_STALLED_S = 90.0
"""Silence of a planning loop beyond its interval after which it is ended, in seconds; forecasts take time."""

LAST_LINES = 10
"""The number of lines of its log that are shown of a worker that failed."""


@dataclass
class _Steps:
    """The steps that were taken to end one worker's process. They are not written down."""

    gone_since_s: float | None = None
    is_revoked: bool = False
    is_signalled: bool = False
    is_killed: bool = False
    killer: str = ""


class Termination:
    """Ends processes of workers, and notices the ends of processes.

    ``killed`` counts the workers that were killed at their drain deadline.
    """

    def __init__(
        self, launch: Launch, ports: FleetPorts, link: StoreLink, health: HealthPoll, stalls: StallDetector
    ) -> None:
        self._launches = CurrentLaunch(launch)
        self._circus = ports.circus
        self._processes = ports.processes
        self._clock = ports.clock
        self._terminal = ports.terminal
        self._link = link
        self._health = health
        self._stalls = stalls
        self._known_oom_kills, _ = self._processes.oom_kills()
        self._steps: defaultdict[str, _Steps] = defaultdict(_Steps)
        self._exit_codes: dict[int, int] = {}
        self.killed = 0

    @property
    def _launch(self) -> Launch:
        return self._launches.now

    @property
    def gone(self) -> frozenset[str]:
        """The workers whose process is gone, and whose session or exit code is still waited for."""
        return frozenset(name for name, each in self._steps.items() if each.gone_since_s is not None)

    def record_exit(self, pid: int, exit_code: int) -> None:
        self._exit_codes[pid] = exit_code

    def forget(self, name: str) -> None:
        """Forget the termination of a worker that is gone."""
        self._steps.pop(name, None)

    def exits(self, workers: Iterable[Worker]) -> dict[str, Exit]:
        """Return the workers whose process and session are gone, with the exit code if known."""
        now_s = self._clock.now_s()
        kills, where = self._processes.oom_kills()
        out_of_memory_words = describe_oom_kills(kills - self._known_oom_kills, where)
        exits: dict[str, Exit] = {}
        for worker in workers:
            if not worker.pid:
                continue
            steps = self._steps[worker.name]
            if self._runs(worker):
                steps.gone_since_s = None
                self._exit_codes.pop(worker.pid, None)  # of an earlier process with that pid
                continue
            # /proc tells of an end at once, circus of its code a moment later, or never while serve is away.
            if steps.gone_since_s is None:
                steps.gone_since_s = now_s
            is_late = now_s - steps.gone_since_s > EXIT_CODE_TIMEOUT_S
            is_group_gone = not self._processes.kill_group(worker.pid, worker.started_at)
            if is_group_gone and (is_late or worker.pid in self._exit_codes):
                # Whom this has killed ended by that, also where circus has not reaped it in time.
                code = self._exit_codes.pop(worker.pid, -SIGKILL if steps.is_killed else None)
                killer = steps.killer or out_of_memory_words
                exits[worker.name] = Exit(code, self._last_lines(worker), killer)
                del self._steps[worker.name]
                remove_files_of(worker.name, self._launch.scratch_dir)
        if not self.gone:  # else a kill may be of the one whose end is still waited for
            self._known_oom_kills = kills
        return exits

    def kill_hung(self, workers: Mapping[str, Worker]) -> None:
        """Kill workers that no longer answer, and planners without heartbeats: they count as crashed then."""
        timeout_of = self._launch.health_timeout_of
        self._health.poll(suspects(workers, timeout_of))
        for worker in hung(workers, self._health.silent_s, timeout_of):
            self._kill_hung(worker, timeout_of(worker.component))
        for worker in workers.values():
            if worker.role is Role.PLANNER and worker.pid and worker.state is not WorkerState.DRAINING:
                overdue_s = self._stalls.overdue_s(worker.name, worker.pid)
                if overdue_s > PLANNER_STALLED_S:
                    self._kill_hung(worker, overdue_s)

    def _kill_hung(self, worker: Worker, silence_s: float) -> None:
        steps = self._steps[worker.name]
        if not steps.is_killed:
            steps.is_killed = True
            steps.killer = f"it stood still for {silence_s:.0f} s"
            silence = f"no answer for {silence_s:.0f} s"
            self._terminal.report(f"{worker.name} stands still: {silence}. It is killed.")
        self._processes.kill_group(worker.pid, worker.started_at)

    async def advance(self, worker: Worker) -> None:
        """Take the next step that is due to end a draining worker."""
        link, steps = self._link, self._steps[worker.name]
        age_s = self._clock.now_s() - worker.since_s
        if age_s >= self._leave_timeout_s(worker) + KILL_GRACE_S:
            if not steps.is_killed:
                steps.is_killed = True
                steps.killer = f"it had not left within {age_s:.0f} s"
                self.killed += 1
                late = f"{worker.name} did not leave within {age_s:.0f} s: killed."
                self._terminal.report(f"{late} What it held is lost.")
            self._processes.kill_group(worker.pid, worker.started_at)
            return
        is_by_lease = worker.role is Role.DECODE and worker.instance_id != 0
        if is_by_lease and not steps.is_revoked:
            steps.is_revoked = True
            link.revoke(worker.instance_id)
        is_ignored = age_s >= REVOKED_REACT_S or worker.instance_id in link.unanswered
        if not steps.is_signalled and (not is_by_lease or is_ignored):
            steps.is_signalled = True
            await self._circus.signal(worker.name, SIGTERM)

    def kill_deadline_s(self, worker: Worker) -> float:
        """The moment at which a draining worker that is still there is killed, on the monotonic clock."""
        return worker.since_s + self._leave_timeout_s(worker) + KILL_GRACE_S

    def _leave_timeout_s(self, worker: Worker) -> float:
        timeout_s = self._launch.leave_timeout_of(worker.component)
        return timeout_s if worker.url else min(timeout_s, LOADING_LEAVE_S)

    def _runs(self, worker: Worker) -> bool:
        return bool(worker.started_at) and self._processes.identify(worker.pid) == worker.started_at

    def _last_lines(self, worker: Worker) -> str:
        return "\n".join(tail(self._launch.log_dir / f"{worker.name}.log", LAST_LINES))
