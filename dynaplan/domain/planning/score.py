"""The score of a policy: what it gave the requests that came, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyScore:
    """The sums over some intervals of one policy.

    ``requests`` came, ``late`` of them missed a target. ``gpu_s`` are the GPU seconds of the workers that
    were asked for, starting ones included. ``changes`` are the decisions that changed
    something, ``lasted_s`` the seconds of all intervals.
    """

    requests: float = 0.0
    late: float = 0.0
    gpu_s: float = 0.0
    changes: int = 0
    lasted_s: float = 0.0

    @property
    def attainment(self) -> float | None:
        """The part of the requests that kept every target, 0 to 1; None without requests."""
        return 1 - self.late / self.requests if self.requests else None

    @property
    def gpu_hours(self) -> float:
        """The GPU hours of the workers that were asked for."""
        return self.gpu_s / 3600

    @property
    def gpus(self) -> float:
        """The mean number of GPUs that were asked for; 0 before the first interval."""
        return self.gpu_s / self.lasted_s if self.lasted_s else 0.0

    def __add__(self, other: PolicyScore) -> PolicyScore:
        """Add the sums of other intervals."""
        return PolicyScore(
            self.requests + other.requests,
            self.late + other.late,
            self.gpu_s + other.gpu_s,
            self.changes + other.changes,
            self.lasted_s + other.lasted_s,
        )
