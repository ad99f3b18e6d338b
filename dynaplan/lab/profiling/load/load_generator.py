"""The port of load generators, which send the measured requests and time their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dynaplan.lab.profiling.load.completions import Answer
from dynaplan.lab.profiling.load.programs import find_program
from dynaplan.util.errors import ConfigError

OWN, AIPERF = "own", "aiperf"
"""The values of ``--load-generator`` beside ``auto``, which is aiperf if it is installed."""

AIPERF_HINT = "Install it in an environment of its own: pipx install aiperf==0.13.0."
"""The hint where it is missing. It pins its dependencies narrowly, hence the environment."""


class LoadGenerator(Protocol):
    """Sends streaming requests to one deployment and times their answers, in ms."""

    @property
    def requests_at_a_time(self) -> int:
        """The least number of requests that one call should have when they are sent one by one."""

    async def prime(self, prompt: Sequence[int]) -> None:
        """Have the prompt computed, unmeasured; raises PermanentError or TemporaryError."""

    async def answers(
        self, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int
    ) -> list[Answer]:
        """Send ``concurrency`` requests at a time; return the answer to each prompt, of ``output_tokens``.

        Raises PermanentError when an answer is an error, is cut short, or has other token counts than asked
        for; TemporaryError when it takes more than half an hour.
        """


def aiperf_program(load_generator: str) -> str:
    """Return the path of aiperf, empty for our own generator; ConfigError when aiperf is not installed."""
    if load_generator == OWN:
        return ""
    program = find_program(AIPERF)
    if not program and load_generator == AIPERF:
        raise ConfigError("load-generator is aiperf, but there is no program aiperf", hint=AIPERF_HINT)
    return program
