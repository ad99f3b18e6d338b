"""Numbers of workers, and one stage of how they came about."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dynaplan.domain.lifecycle import Role


@dataclass(frozen=True)
class Targets:
    """Numbers of prefill and decode workers: current, proposed or desired."""

    prefill: int = 0
    decode: int = 0

    def of(self, role: Role) -> int:
        """Return the number for ``Role.PREFILL`` or ``Role.DECODE``."""
        return self.prefill if role is Role.PREFILL else self.decode

    def plus(self, role: Role, workers: int) -> Targets:
        """Return a copy with ``workers`` more of the role; fewer when negative."""
        if role is Role.PREFILL:
            return replace(self, prefill=self.prefill + workers)
        return replace(self, decode=self.decode + workers)

    def __str__(self) -> str:
        return f"prefill {self.prefill}, decode {self.decode}"


@dataclass(frozen=True)
class Step:
    """One stage of a decision: the numbers before and after it, and why. "Unchanged" is a result too."""

    stage: str
    before: Targets
    after: Targets
    why: str
