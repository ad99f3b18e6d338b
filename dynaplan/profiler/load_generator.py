"""Who sends the requests that are measured, and times their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dynaplan.domain.errors import ConfigError
from dynaplan.profiler.completions import Answer
from dynaplan.profiler.programs import find_program

OWN, AIPERF = "own", "aiperf"
"""What ``--load-generator`` may be, beside ``auto``: aiperf where it is installed."""

AIPERF_HINT = "Install it in an environment of its own, its versions are narrow: pipx install aiperf==0.13.0"


class LoadGenerator(Protocol):
    """Sends requests to one deployment."""

    @property
    def requests_at_a_time(self) -> int:
        """How many requests one call should have at least, when they come one by one."""

    async def prime(self, prompt: Sequence[int]) -> None:
        """Have the prompt computed, unmeasured; raises PermanentError or TemporaryError."""

    async def answers(
        self, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int
    ) -> list[Answer]:
        """The answer to each prompt, so many at once, of exactly so many tokens.

        Raises PermanentError when an answer is an error, is cut short, or has other token counts than asked
        for; TemporaryError when it takes more than half an hour.
        """


def aiperf_program(load_generator: str) -> str:
    """The path of aiperf when this is to use it, else nothing; ConfigError when it is not installed."""
    if load_generator == OWN:
        return ""
    program = find_program(AIPERF)
    if not program and load_generator == AIPERF:
        raise ConfigError("load-generator is aiperf, but there is no program aiperf", hint=AIPERF_HINT)
    return program
