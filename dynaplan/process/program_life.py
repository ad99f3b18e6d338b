"""The life of ``serve`` as its supervisor sees it: the states, and what moves it from one to the next.

Here stand when a program is started, for how long it is waited for, and when everything ends without it; no
process, no signal, no clock. Times are monotonic seconds.

| state | who runs |
|---|---|
| FIRST | the program that has put itself under the supervisor |
| HERE | one that has said that all is as before, and beats since |
| AWAY | none, or one that has not said so yet; the next is started at ``start_at_s`` |
| TRIAL | the same, of another program than before (an upgrade) |
| OVER | none, and none is started any more |

``MOVES`` has what moves it. What follows of a move:

1. To TRIAL: somebody has left a successor's command, and killed the program for it. The command of before is
   kept.
2. To OVER, by its own exit or a signal to end: everything ends with it.
3. To AWAY: it was killed, or ended before it had said that it is here. It starts again, at once if it was
   here for ``STEADY_S``, else after a pause that doubles from ``FIRST_PAUSE_S`` to ``LONGEST_PAUSE_S``.
4. Nobody has been here for the grace: ``is_grace_over``, and everything ends.
5. From TRIAL to AWAY: it ended, could not be started, or took ``TRIAL_S`` (half of the grace at most). The
   command of before starts at once. The grace goes on from where the trial began.
6. Its heartbeat has not moved at ``STILL_CHECKS`` looks in a row, within ``still_s``: it ``is_still``, and is
   killed, which is 3. Looks are counted and not seconds, so that a supervisor that stood still itself, with
   the whole machine, accuses nobody. A program whose heartbeat cannot be read is not judged.

The supervisor watches ``serve``, ``serve`` its fleet plugin (``fleet/watchdog.py``), the plugin the workers
and planners (``fleet/plugin/stall_detection.py``), and a worker its engine (``EngineWatchdog``): nobody is
watched by what it watches. How a worker ends is ``graph/lifecycle.py``'s table.

The example that surprises: a program that is killed in the midst of its start (FIRST, or AWAY) is away since
the *last* one was here, not since this one ended, so that a crash loop cannot renew the grace for ever.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FIRST, HERE, AWAY, TRIAL, OVER = "first", "here", "away", "trial", "over"

ARRIVED, EXITED, KILLED, SUCCEEDED, FINISHED = "arrived", "exited", "killed", "succeeded", "finished"
"""What happens: it says that it is here; it exits, or a signal to end kills it; it is killed, or cannot be
started; it is killed, and has a successor; the grace is over, or somebody has asked for the end."""

MOVES = {
    FIRST: {ARRIVED: HERE, EXITED: OVER, KILLED: AWAY, SUCCEEDED: TRIAL, FINISHED: OVER},
    HERE: {ARRIVED: HERE, EXITED: OVER, KILLED: AWAY, SUCCEEDED: TRIAL, FINISHED: OVER},
    AWAY: {ARRIVED: HERE, EXITED: AWAY, KILLED: AWAY, SUCCEEDED: TRIAL, FINISHED: OVER},
    TRIAL: {ARRIVED: HERE, EXITED: AWAY, KILLED: AWAY, SUCCEEDED: TRIAL, FINISHED: OVER},
    OVER: {},
}
"""What may not stand here: EXITED: OVER in AWAY or TRIAL. A program that ends before it is here, with any
code, was not asked to end what the one before has started."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Pauses before a program that does not come back is started once more."""

STEADY_S = 1.0
"""A program that was there for as long is started again at once."""

TRIAL_S = 60.0
"""Longest time for another program to be here, at most half of the grace; then the one before is started."""


STILL_CHECKS = 6
"""Looks at a heartbeat that does not move, after which the program stands still."""


class IllegalMove(Exception):
    """Something happened that cannot in this state: a fault of the supervisor."""


class ProgramLife:
    """One deployment's program: its state, the command that starts it, and the moments that count.

    ``away_since_s`` is when the last program that was here has gone, or the supervisor began. Not a frozen
    record: the supervisor imports neither ``dataclasses`` nor ``enum``, which would double its memory.
    """

    def __init__(self, command: Sequence[str], grace_s: float, now_s: float) -> None:
        self.state = FIRST
        self.command = command
        self.fallback_command: Sequence[str] = ()  # on trial: the command that is started again if it fails
        self.away_since_s = now_s
        self.start_at_s = 0.0
        self._grace_s = grace_s
        self._here_since_s = 0.0
        self._pause_s = 0.0
        self._still_s = 0.0
        self._look_at_s = 0.0
        self._beat = 0
        self._missed = 0

    @property
    def is_awaited(self) -> bool:
        """True from the end of a program until the next one says that it is here."""
        return self.state in (AWAY, TRIAL)

    @property
    def is_on_trial(self) -> bool:
        return self.state == TRIAL

    @property
    def trial_ends_s(self) -> float:
        return self.away_since_s + min(TRIAL_S, self._grace_s / 2)

    def is_grace_over(self, now_s: float) -> bool:
        """Tell whether everything is to end, since nobody has come back in time."""
        return self.is_awaited and now_s >= self.away_since_s + self._grace_s

    def away_s(self, now_s: float) -> float:
        """Return the time since a program was here last, for one that has just come; 0 for the first."""
        return 0.0 if self.state == FIRST else now_s - self.away_since_s

    def due_at_s(self, *, is_running: bool) -> float:
        """Return when something is to be done of which no event tells; infinite for never."""
        if not self.is_awaited:
            return self._look_at_s if self.state == HERE and self._still_s else float("inf")
        end_s = self.trial_ends_s if self.is_on_trial else self.away_since_s + self._grace_s
        return end_s if is_running else min(end_s, self.start_at_s)

    def arrived(self, now_s: float, still_s: float = 0.0) -> None:
        """Note that the program says that it runs; without a heartbeat for ``still_s`` it stands still."""
        self._move(ARRIVED)
        self._here_since_s, self.fallback_command = now_s, ()
        self._still_s, self._look_at_s, self._missed = still_s, now_s, 0

    def is_still(self, now_s: float, read_beat: Callable[[], int]) -> bool:
        """Tell whether a program that runs has missed its heartbeats (case 6 of this module).

        ``read_beat`` returns a number that each beat changes, 0 where it cannot be read. It is called only
        when the next look is due; before that the answer is False.
        """
        if now_s < self.due_at_s(is_running=True) or self.is_awaited:
            return False
        beat = read_beat()
        self._missed = self._missed + 1 if beat and beat == self._beat else 0
        self._beat, self._look_at_s = beat, now_s + self._still_s / STILL_CHECKS
        return self._missed >= STILL_CHECKS

    def ended(self, now_s: float, *, is_meant: bool, successor: Sequence[str] = ()) -> None:
        """Note that the program has ended, and choose what is started next, and when.

        ``is_meant``: it ended by itself, or by a signal to end. ``successor`` is the command of the version
        that takes its place; empty for none.
        """
        before = self.state
        self._move(SUCCEEDED if successor else EXITED if is_meant else KILLED)
        if self.state == TRIAL:  # case 1
            self.fallback_command, self.command = self.command, successor
            self.away_since_s = self.start_at_s = now_s
            self._pause_s = 0.0
        elif before == TRIAL:  # case 5
            self.command, self.fallback_command = self.fallback_command, ()
            self._pause_s, self.start_at_s = 0.0, now_s
        elif self.state == AWAY:  # case 3
            if before == HERE:
                self.away_since_s = now_s
                self._pause_s = 0.0 if now_s - self._here_since_s >= STEADY_S else FIRST_PAUSE_S
            else:
                self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self.start_at_s = now_s + self._pause_s

    def start_failed(self, now_s: float) -> None:
        """Note that the program could not even be started.

        A version on trial gives way to the one before it; any other program is tried again after the longest
        pause.
        """
        if self.is_on_trial:
            self.ended(now_s, is_meant=False)
        else:
            self._pause_s = LONGEST_PAUSE_S
            self.start_at_s = now_s + self._pause_s

    def finish(self) -> None:
        """Note that everything ends: the grace is over, or somebody has asked for it."""
        self._move(FINISHED)

    def _move(self, event: str) -> None:
        if event not in MOVES[self.state]:
            raise IllegalMove(f"{event} while {self.state}")
        self.state = MOVES[self.state][event]
