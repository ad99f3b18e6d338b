"""The order in which prompts leave the prefill queue when it is dispatched by deadline.

Where prompts come faster than they are computed, serving the oldest first makes every one late: each is
computed just after its target has passed. So a prompt that can no longer meet its target goes behind those
that can. It costs no GPU, and the prompts that it passes over are late anyway.

A prompt has a *deadline*, its arrival plus the TTFT target. It is *late* once too little is left:

    slack = deadline - now - usual,  late below 0
    usual = mean + deviation         of the time from taking a prompt to its hand-over, smoothed,
                                     but at most half of the target

At most half, so that a prompt which has just come is never late: where computing alone takes longer than the
target, all are equal, and the order is that of arrival for the first half of the target.
Mean and deviation are smoothed as TCP's round-trip times are, with the weights of RFC 6298, section 2.

**One consumer rule.** Every prefill worker that asks for a prompt gets, of the shared queue,

1. the oldest late one that is *owed*: its deadline is ``late_wait_s`` ago; but at most every second time,
   as long as any prompt is in time;
2. else the oldest that is in time (those found late on the way become late);
3. else the oldest late one.

So there are two classes, first come first served within each, and a prompt that is owed is passed over by no
more than one prompt for each that is owed before it. A worker's own lane (``directed_prefill``) keeps the
order of arrival: what waits there waits for what that worker has cached.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynaplan.domain.settings.routing import DisaggregationSettings

MEAN_WEIGHT = 1 / 8
"""Weight of the newest time in the mean: RFC 6298's alpha."""

DEVIATION_WEIGHT = 1 / 4
"""Weight of the newest distance from the mean in the deviation: RFC 6298's beta."""

DEVIATIONS = 1.0
"""Deviations above the mean that are usual. Under overload most prompts that are computed are at the edge:
with none half of these miss all the same, with many some are given up that could have been in time. Simulated
with bursts a little above what two workers bear, 0, 1, 2 and 4 deviations had 66, 71, 71 and 57 % in time."""


@dataclass(frozen=True)
class ComputingTime:
    """The time from taking a prompt to its hand-over, s: a smoothed mean, and a smoothed deviation."""

    mean_s: float = 0.0
    deviation_s: float = 0.0

    @property
    def usual_s(self) -> float:
        """The time, s, that few prompts exceed; 0 before any was seen."""
        return self.mean_s + DEVIATIONS * self.deviation_s

    def after(self, took_s: float) -> ComputingTime:
        """Return the time with one more prompt seen, which took ``took_s`` seconds."""
        if not self.mean_s:
            return ComputingTime(took_s, took_s / 2)
        apart_s = abs(took_s - self.mean_s)
        return ComputingTime(
            self.mean_s + MEAN_WEIGHT * (took_s - self.mean_s),
            self.deviation_s + DEVIATION_WEIGHT * (apart_s - self.deviation_s),
        )


@dataclass(frozen=True)
class DispatchRule:
    """The rule of the module. Deadlines and *now* are of one clock, in seconds."""

    late_wait_s: float

    @classmethod
    def of(cls, settings: DisaggregationSettings) -> DispatchRule | None:
        """Return the rule of the settings; None where prompts are computed in the order of arrival."""
        return cls(settings.prefill_late_wait_s) if settings.prefill_deadline_ms else None

    def is_late(self, arrived_s: float, deadline_s: float, now_s: float, usual_s: float) -> bool:
        """Tell whether a prompt that is taken now misses its deadline."""
        return now_s + min(usual_s, (deadline_s - arrived_s) / 2) > deadline_s

    def is_owed(self, deadline_s: float, now_s: float) -> bool:
        """Tell whether a late prompt has been passed over for long enough."""
        return now_s - deadline_s >= self.late_wait_s

    def takes_late(
        self, oldest_deadline_s: float | None, now_s: float, *, any_in_time: bool, was_owed: bool
    ) -> bool:
        """Tell whether the oldest late prompt is next; its deadline is None where there is none.

        ``was_owed``: the last prompt that was taken was late and owed, while others were in time.
        """
        if oldest_deadline_s is None:
            return False
        return not any_in_time or (not was_owed and self.is_owed(oldest_deadline_s, now_s))
