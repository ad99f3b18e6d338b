"""What the frontends of the simulated service would tell about the traffic."""

from __future__ import annotations

from bisect import bisect_left
from statistics import fmean, variance

from dynaplan.domain.trace import TracedRequest
from dynaplan.domain.traffic import INPUT_TOKENS, OUTPUT_TOKENS, Lengths, Traffic

PROMPTS, ANSWERS = INPUT_TOKENS[1:], OUTPUT_TOKENS[1:]
"""The buckets of lengths; the frontends' first bound is 0, and nothing is shorter than 1 token."""

FEWEST_PULLS = 5
"""For a variance."""


class TrafficMeter:
    """Counts as the frontends' metrics do: arrivals at once, lengths and duration at the end of a request."""

    def __init__(self) -> None:
        self._begin()

    def arrived(self) -> None:
        """A request came in."""
        self._arrived += 1

    def first_token(self, ttft_s: float) -> None:
        """A client got its first token after that time."""
        self._ttft_s.append(ttft_s)

    def finished(self, traced: TracedRequest, decoding_s: float, duration_s: float) -> None:
        """A request was answered; ``decoding_s`` lay between its first and its last token."""
        tokens = traced.output_tokens
        self._isl[bisect_left(PROMPTS, traced.prompt_tokens)] += 1
        self._osl[bisect_left(ANSWERS, tokens)] += 1
        self._finished += 1
        self._prompt_tokens += traced.prompt_tokens
        self._output_tokens += tokens
        self._decoding_s += decoding_s
        self._duration_s += duration_s

    def pull(self) -> None:
        """A metric pull."""
        self._pulls.append(self._arrived - sum(self._pulls))

    def traffic(self, interval_s: float) -> Traffic:
        """What was seen since the last call, which was that long ago."""
        finished, gaps = self._finished, self._output_tokens - self._finished
        seen = Traffic(
            interval_s,
            float(self._arrived),
            self._prompt_tokens / finished if finished else None,
            self._output_tokens / finished if finished else None,
            1000 * fmean(self._ttft_s) if self._ttft_s else None,
            1000 * self._decoding_s / gaps if gaps else None,
            1000 * self._duration_s / finished if finished else None,
            Lengths(PROMPTS, tuple(self._isl), self._prompt_tokens / finished) if finished else None,
            Lengths(ANSWERS, tuple(self._osl), self._output_tokens / finished) if finished else None,
            dispersion(self._pulls),
        )
        self._begin()
        return seen

    def _begin(self) -> None:
        self._arrived = self._finished = self._prompt_tokens = self._output_tokens = 0
        self._decoding_s = self._duration_s = 0.0
        self._ttft_s: list[float] = []
        self._pulls: list[int] = []
        self._isl = [0] * (len(PROMPTS) + 1)
        self._osl = [0] * (len(ANSWERS) + 1)


def dispersion(arrivals: list[int]) -> float | None:
    """The variance of the numbers of arrivals over their mean; None for too few numbers, or nothing but 0."""
    if len(arrivals) < FEWEST_PULLS or not sum(arrivals):
        return None
    return variance(arrivals) / fmean(arrivals)
