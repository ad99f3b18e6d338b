"""The order in which prompts leave the prefill queue when it is dispatched by deadline.

Where prompts come faster than they are computed, serving the oldest first makes every one late: each is
computed just after its target has passed. So a prompt that can no longer meet its target goes behind those
that can. It costs no GPU, and the prompts that it passes over are late anyway.

A prompt has a *deadline* for its hand-over. It is *late* once too little is left to compute it:

    slack    = deadline - now - usual,  late below 0
    deadline = arrival + target - rest
    usual    = mean + deviation         of the time from taking a prompt to its hand-over, smoothed,
                                        but at most nine tenths of the time until the deadline at first
    rest     = mean + deviation         of the time from the hand-over to the first token, smoothed,
                                        but at most half of the target

Both are bounded so that a prompt which has just come is never late: where computing alone takes longer than
there is, all are equal, and nearly all of them late, which is the order of arrival.
Mean and deviation are smoothed as TCP's round-trip times are, with the weights of RFC 6298, section 2.

**One consumer rule.** Every prefill worker that asks for a prompt gets, of the shared queue,

1. the oldest late one that is *owed*: its deadline is w = ``late_wait_s`` ago or more; but not at each turn,
   as long as any prompt is in time: with its deadline t ago, at the share min(1, t / w - 1) / 2 of the turns;
2. else the oldest that is in time (those found late on the way become late);
3. else the oldest late one.

So there are two classes, first come first served within each. From t = 2 w on every second turn is an owed
one's: no prompt is then passed over by more than one prompt for each that is owed before it. Until then
owed ones get no more turns than keep the oldest from waiting longer than that: what a burst makes late is
computed when it is over, if it is over in time. With the default w, t = 2 w is when a frontend would give up
waiting and have the decode worker compute the prompt (``prefill-wait``), which all that decode there pay for.
More than a half is never given: in an overload that lasts, everyone would be late again. A worker's own lane
(``route_prefill``) keeps the order of arrival: what waits there waits for what that worker has cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dynaplan.config.settings.frontend import DisaggregationSettings

MEAN_WEIGHT = 1 / 8
"""Weight of the newest time in the mean: RFC 6298's alpha."""

DEVIATION_WEIGHT = 1 / 4
"""Weight of the newest distance from the mean in the deviation: RFC 6298's beta."""

DEVIATIONS = 1.0
"""Deviations above the mean that are usual. Under overload most prompts that are computed are at the edge:
with none half of these miss all the same, with many some are given up that could have been in time. Simulated
with bursts a little above what two workers bear, 0, 1, 2 and 4 deviations had 66, 71, 71 and 57 % in time."""


MAX_COMPUTING_SHARE, MAX_REST_SHARE = 0.9, 0.5
"""The most that is left for computing a prompt, of the time from its arrival to its deadline, and for what
comes after its hand-over, of the target."""

OWED_SHARE = 1 / 2
"""The largest part of the turns that owed prompts get while others are in time."""


class UsualTime(NamedTuple):
    """A usual time, s: a smoothed mean, and a smoothed deviation."""

    mean_s: float = 0.0
    deviation_s: float = 0.0

    @property
    def usual_s(self) -> float:
        """The time, s, that few prompts exceed; 0 before any was seen."""
        return self.mean_s + DEVIATIONS * self.deviation_s

    def after(self, took_s: float) -> UsualTime:
        """Return the time with one more prompt seen, which took ``took_s`` seconds."""
        if not self.mean_s:
            return UsualTime(took_s, took_s / 2)
        apart_s = abs(took_s - self.mean_s)
        return UsualTime(
            self.mean_s + MEAN_WEIGHT * (took_s - self.mean_s),
            self.deviation_s + DEVIATION_WEIGHT * (apart_s - self.deviation_s),
        )


def deadline_s(arrived_s: float, target_ms: float, rest: UsualTime) -> float:
    """Return the time by which a prompt is to be computed and handed to the decode worker.

    ``rest`` is the usual time from then to the first token, ``target_ms`` the TTFT that is promised.
    """
    target_s = target_ms / 1000
    return arrived_s + target_s - min(rest.usual_s, target_s * MAX_REST_SHARE)


@dataclass(frozen=True)
class DispatchRule:
    """The rule by which the next prompt of the queue is chosen: in time by deadline, late ones by turns.

    All times are seconds on one clock.
    """

    late_wait_s: float

    @classmethod
    def of(cls, settings: DisaggregationSettings) -> DispatchRule | None:
        """Return the rule of the settings; None where prompts are computed in the order of arrival."""
        return cls(settings.prefill_late_wait_s) if settings.prefill_deadline_ms else None

    def is_late(self, arrived_s: float, deadline_s: float, now_s: float, usual_s: float) -> bool:
        """Tell whether a prompt that is taken now misses its deadline."""
        return now_s + min(usual_s, (deadline_s - arrived_s) * MAX_COMPUTING_SHARE) > deadline_s

    def owed_share(self, late_s: float) -> float:
        """Return the part of the turns that is due to late prompts, the oldest deadline ``late_s`` ago."""
        over_s = late_s - self.late_wait_s
        if over_s < 0:
            return 0.0
        return OWED_SHARE * min(1.0, over_s / self.late_wait_s if self.late_wait_s else 1.0)

    def is_owed(self, deadline_s: float, now_s: float, since_owed: int) -> bool:
        """Tell whether the oldest late prompt has its turn, though others are in time.

        ``since_owed`` prompts were taken since the last such turn.
        """
        return (since_owed + 1) * self.owed_share(now_s - deadline_s) >= 1

    def takes_late(
        self, oldest_deadline_s: float | None, now_s: float, *, any_in_time: bool, since_owed: int
    ) -> bool:
        """Tell whether the oldest late prompt is next; its deadline is None where there is none."""
        if oldest_deadline_s is None:
            return False
        return not any_in_time or self.is_owed(oldest_deadline_s, now_s, since_owed)
