"""Sizing by the formulas of Dynamo's SLA planner (0.7 to 0.9): means, a profile, and correction factors.

The numbers are the original's wherever it has any. Where it fails, this does not: no traffic is no demand, no
data changes nothing, a profile that expects nothing corrects nothing, and no budget is exceeded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dynaplan.core.sizing.gpu_budget import limited
from dynaplan.core.sizing.interpolation import DecodeInterpolator, PrefillInterpolator
from dynaplan.domain.planning.sizing import Corrections, Sizing, SlaTargets, WorkerLimits
from dynaplan.domain.planning.targets import Step, Targets
from dynaplan.domain.planning.traffic import Expected, Traffic
from dynaplan.domain.profile import ProfileTables


@dataclass(frozen=True)
class Formula:
    """The formulas over one profile per role."""

    prefill: PrefillInterpolator
    decode: DecodeInterpolator

    @classmethod
    def from_tables(cls, prefill: ProfileTables, decode: ProfileTables) -> Formula:
        """Over the prefill half of one profile and the decode half of another, or of the same."""
        return cls(PrefillInterpolator(prefill.prefill), DecodeInterpolator(decode.decode))

    def corrections(
        self, before: Corrections, traffic: Traffic, decode_workers: int
    ) -> tuple[Corrections, str]:
        """What the interval makes of the corrections, and why; a factor that is not known stays as it was."""
        isl, osl = _number(traffic.isl_tokens), _number(traffic.osl_tokens)
        requests, duration_ms = _number(traffic.requests), _number(traffic.duration_ms)
        if not requests or isl is None or osl is None:
            why = (
                "there were no requests" if requests == 0 else traffic.missing or "something was not measured"
            )
            return before, f"corrections stay at {_words(before)}: {why}"
        after, ttft_ms, itl_ms = before, _number(traffic.ttft_ms), _number(traffic.itl_ms)
        expected_ms = self.prefill.ttft_ms(isl)
        if ttft_ms is not None and expected_ms > 0:
            after = replace(after, prefill=ttft_ms / expected_ms)
        if itl_ms is not None and duration_ms is not None and decode_workers > 0:
            concurrency = requests / decode_workers * duration_ms / 1000 / traffic.interval_s
            expected_itl_ms = self.decode.itl_ms(concurrency, isl + osl / 2)
            if expected_itl_ms > 0:
                after = replace(after, decode=itl_ms / expected_itl_ms)
        return after, f"measured over expected: {_words(after)}"

    def size(
        self,
        expected: Expected,
        interval_s: float,
        targets: SlaTargets,
        corrections: Corrections,
        limits: WorkerLimits,
        current: Targets,
    ) -> Sizing:
        """The workers that the next interval needs within the limits, and why."""
        requests = _number(expected.requests)
        isl, osl = _number(expected.isl_tokens), _number(expected.osl_tokens)
        if requests == 0:
            step = Step("demand", current, Targets(), "no requests are expected: no demand")
            allowed, bounds = limited(Targets(), limits, current)
            return Sizing(allowed, (step, *bounds))
        if requests is None or isl is None or osl is None or isl + osl <= 0:
            why = "no data: change nothing, because no requests or lengths could be foretold"
            return Sizing(current, (Step("demand", current, current, why),))
        rate = requests / interval_s
        prefill, why_prefill = self._prefill_workers(rate, isl, corrections, limits)
        decode, why_decode = self._decode_workers(rate, isl, osl, targets, corrections, limits)
        if prefill is None or decode is None:
            why = f"the profile promises nothing here: change nothing ({why_prefill}; {why_decode})"
            return Sizing(current, (Step("profile", current, current, why),))
        between, wanted = Targets(prefill, current.decode), Targets(prefill, decode)
        steps = [
            Step("prefill", current, between, why_prefill),
            Step("decode", between, wanted, why_decode),
        ]
        allowed, bounds = limited(wanted, limits, current)
        return Sizing(allowed, (*steps, *bounds))

    def _prefill_workers(
        self, rate: float, isl_tokens: float, corrections: Corrections, limits: WorkerLimits
    ) -> tuple[int | None, str]:
        """A high factor comes from queueing, which more workers cure: it does not count; a low one does."""
        load = rate * isl_tokens * min(1.0, corrections.prefill)
        throughput = self.prefill.tokens_per_s_per_gpu(isl_tokens)
        why = f"{load:.0f} prompt tokens/s at {throughput:.0f} tokens/s for each GPU"
        if throughput <= 0:
            return None, why
        return math.ceil(load / throughput / limits.prefill_gpus), why

    def _decode_workers(
        self,
        rate: float,
        isl_tokens: float,
        osl_tokens: float,
        targets: SlaTargets,
        corrections: Corrections,
        limits: WorkerLimits,
    ) -> tuple[int | None, str]:
        itl_ms = targets.itl_ms / corrections.decode if corrections.decode > 0 else targets.itl_ms
        best = self.decode.find_best_throughput_per_gpu(itl_ms, isl_tokens + osl_tokens / 2)
        throughput = best.tokens_per_s_per_gpu
        why = f"{rate * osl_tokens:.0f} tokens/s at {throughput:.0f} tokens/s for each GPU"
        why += f", ITL {best.itl_ms:.3g} ms for {itl_ms:.3g}, KV usage {best.kv_usage:.2f}"
        if throughput <= 0:
            return None, why
        return math.ceil(rate * osl_tokens / throughput / limits.decode_gpus), why


def _number(value: float | None) -> float | None:
    """The value, or None when it is not one that can be counted with."""
    return value if value is not None and math.isfinite(value) and value >= 0 else None


def _words(corrections: Corrections) -> str:
    return f"TTFT {corrections.prefill:.3g}, ITL {corrections.decode:.3g}"
