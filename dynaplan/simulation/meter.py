"""The traffic metrics that the frontends of the simulated service would export.

Keeps sums, counts and the arrivals of the last pulls, so that memory stays constant when a policy that
stands still never calls ``traffic``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.contract.traffic import INPUT_TOKENS, OUTPUT_TOKENS, Lengths, Traffic

PROMPTS = INPUT_TOKENS[1:]
"""The upper bounds of the buckets of prompt lengths, in tokens: the frontends', without their empty first
one."""

ANSWERS = OUTPUT_TOKENS[1:]
"""The upper bounds of the buckets of answer lengths, in tokens, likewise."""

MIN_PULLS = 5
"""The least number of metric pulls for a variance of the arrivals: from fewer it is mostly chance."""

MAX_PULLS = 1000
"""The pulls of which the arrivals are kept one by one: an interval of the planner has some tens."""


class TrafficMeter:
    """Counts as the frontends' metrics do: arrivals at once, lengths and duration at the end of a request.

    Requests over the promised ``ttft_ms`` and mean ``itl_ms`` are counted.
    """

    def __init__(self, ttft_ms: float, itl_ms: float) -> None:
        self._ttft_ms, self._itl_ms = ttft_ms, itl_ms
        self._begin()

    def arrived(self) -> None:
        """Count a request that came in."""
        self._arrived += 1

    def first_token(self, ttft_s: float) -> None:
        """Count a first token that a client got after that time."""
        self._first_tokens += 1
        self._ttft_s += ttft_s
        self._late += 1000 * ttft_s > self._ttft_ms

    def finished(
        self, traced: TracedRequest, decoding_s: float, duration_s: float, cached_tokens: int = 0
    ) -> None:
        """Count an answered request; ``decoding_s`` lie between its first and its last token.

        ``cached_tokens`` of its prompt came out of a KV cache.
        """
        tokens = traced.output_tokens
        self._isl[bisect_left(PROMPTS, traced.prompt_tokens)] += 1
        self._osl[bisect_left(ANSWERS, tokens)] += 1
        self._finished += 1
        self._prompt_tokens += traced.prompt_tokens
        self._cached_tokens += cached_tokens
        self._output_tokens += tokens
        self._decoding_s += decoding_s
        self._long += 1000 * decoding_s > self._itl_ms * (tokens - 1)
        self._duration_s += duration_s

    def pull(self) -> None:
        """Make a metric pull: note the arrivals since the last one."""
        arrivals = self._arrived - self._pulled
        self._pulled += arrivals
        self._pulls += 1
        self._arrivals.append(float(arrivals))
        self._squares += arrivals * arrivals

    def traffic(self, interval_s: float) -> Traffic:
        """Return the traffic since the last call, ``interval_s`` ago, and restart the interval."""
        seen = self._measured(interval_s)
        self._begin()
        return seen

    def _measured(self, interval_s: float) -> Traffic:
        finished, gaps = self._finished, self._output_tokens - self._finished
        return Traffic(
            interval_s,
            float(self._arrived),
            self._prompt_tokens / finished if finished else None,
            self._output_tokens / finished if finished else None,
            1000 * self._ttft_s / self._first_tokens if self._first_tokens else None,
            1000 * self._decoding_s / gaps if gaps else None,
            1000 * self._duration_s / finished if finished else None,
            Lengths(PROMPTS, tuple(self._isl), self._prompt_tokens / finished) if finished else None,
            Lengths(ANSWERS, tuple(self._osl), self._output_tokens / finished) if finished else None,
            self._dispersion(),
            prefix_hit_rate=self._cached_tokens / self._prompt_tokens if finished else None,
            arrivals=tuple(self._arrivals),
            over_ttft=((self._ttft_ms, float(self._late)),),
            over_itl=((self._itl_ms, float(self._long)),),
            first_tokens=float(self._first_tokens),
        )

    def _dispersion(self) -> float | None:
        """Return the variance of the arrivals per pull over their mean; None for few pulls, or no arrival.

        A pull is made every ``metric_pulling_interval_s`` of the planner's settings.
        """
        pulls, arrivals = self._pulls, self._pulled
        if pulls < MIN_PULLS or not arrivals:
            return None
        variance = (pulls * self._squares - arrivals * arrivals) / (pulls * (pulls - 1))
        return variance / (arrivals / pulls)

    def _begin(self) -> None:
        self._arrived = self._finished = self._prompt_tokens = self._output_tokens = self._cached_tokens = 0
        self._pulls = self._pulled = self._squares = self._first_tokens = self._late = self._long = 0
        self._decoding_s = self._duration_s = self._ttft_s = 0.0
        self._arrivals: deque[float] = deque(maxlen=MAX_PULLS)
        self._isl = [0] * (len(PROMPTS) + 1)
        self._osl = [0] * (len(ANSWERS) + 1)
