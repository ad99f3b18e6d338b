"""A decision's record in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynaplan.config.settings.planner import KV_USAGE_PER_WAITING_REQUEST
from dynaplan.planner.model import Decision, DecisionRecord, DecisionStep
from dynaplan.planner.rules.load_policy import finite
from dynaplan.util.errors import UserError


def explain(document: Mapping[str, Any]) -> str:
    """Return one line of ``decisions.jsonl`` in words; one that cannot be read is named as such.

    Tells the observation, each step with its reason, the decision, and what would have changed it.
    """
    try:
        record = DecisionRecord.from_json(document)
    except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
        return f"a record that cannot be read ({type(error).__name__}: {error})"
    lines = [f"{record.wall_time}  {_verdict(record)}"]
    lines += [f"  observed   {line}" for line in _observed(record)]
    lines += [f"  {_label(step)} {_step(step)}" for step in record.decision.steps]
    lines += [f"  otherwise  {line}" for line in _alternatives(record)]
    return "\n".join(lines)


def summarize(document: Mapping[str, Any]) -> str:
    """Return a record as its time, the decision and its reason; empty for one that cannot be read."""
    try:
        record = DecisionRecord.from_json(document)
    except (KeyError, TypeError, ValueError, AttributeError, UserError):
        return ""
    return f"{record.wall_time[11:19]}  {_verdict(record)}: {record.decision.reason}"


def is_change(document: Mapping[str, Any]) -> bool:
    """Tell whether a line of ``decisions.jsonl`` records a change; False when it cannot be read."""
    try:
        return Decision.from_json(document["decision"]).is_change
    except (KeyError, TypeError, AttributeError):
        return False


def _verdict(record: DecisionRecord) -> str:
    decision = record.decision
    if not decision.is_change:
        return f"no change ({decision.current})"
    would = "would have changed " if record.settings.no_operation else "changed "
    return f"{would}{decision.current} -> {decision.desired}"


def _observed(record: DecisionRecord) -> list[str]:
    observation = record.observation
    load = observation.load
    workers = f"{load.prefill_workers} prefill and {load.decode_workers} decode workers"
    counts = {"prefill": load.prefill_asleep, "decode": load.decode_asleep}
    asleep = " and ".join(f"{count} {role}" for role, count in counts.items() if count)
    sleepers = f", and asleep {asleep} (`dynaplan wake`)" if asleep else ""
    lines = [f"{load.pulls} readings of the load; {workers} registered{sleepers}"]
    usage, depth = finite(load.kv_usage), finite(load.prefill_queue)
    lines.append(f"mean KV usage {_usage(usage)}" if usage is not None else f"no KV usage: {load.kv_missing}")
    if depth is not None:
        first, last = load.prefill_queue_first, load.prefill_queue_last
        lines.append(f"prefill queue {depth:.3g} in all, from {first:g} to {last:g}")
    elif record.decision.current.prefill:
        lines.append(f"no prefill queue: {load.queue_missing}")
    lines += _traffic(record)
    if observation.failure:
        lines.append(f"the decision before was not carried out: {observation.failure}")
    return lines


def _usage(usage: float) -> str:
    """Return a KV usage in words; one above 1, more than the whole cache, says how that comes."""
    waiting = f" (each request that waits adds {KV_USAGE_PER_WAITING_REQUEST:g})" if usage > 1 else ""
    return f"{usage:.3g}{waiting}"


def _traffic(record: DecisionRecord) -> list[str]:
    traffic, foresight = record.observation.traffic, record.observation.foresight
    if traffic is None:
        return []
    if traffic.requests is None:
        lines = [f"no traffic: {traffic.missing}"]
    else:
        seen = [f"{traffic.requests / traffic.interval_s:.3g} requests/s"]
        for name, value, unit in (
            ("ISL", traffic.isl_tokens, ""),
            ("OSL", traffic.osl_tokens, ""),
            ("TTFT", traffic.ttft_ms, " ms"),
            ("ITL", traffic.itl_ms, " ms"),
        ):
            if value is not None:
                seen.append(f"{name} {value:.4g}{unit}")
        if traffic.prefix_hit_rate:
            seen.append(f"{traffic.prefix_hit_rate:.0%} of the prompts cached")
        lines = [", ".join(seen) + " on average"]
    if foresight and foresight.prefix_hit_rate:
        lines.append(f"{1 - foresight.prefix_hit_rate:.0%} of the prompts' tokens expected to be computed")
    for expected in foresight.expected if foresight else ():
        if foresight and expected.requests is not None:
            ahead_s = expected.ahead * foresight.interval_s
            rate = expected.requests / foresight.interval_s
            lines.append(f"{rate:.3g} requests/s expected in {ahead_s:g} s ({expected.why})")
    prediction = record.decision.prediction
    if prediction:
        lines.append(f"expected then: TTFT {prediction.ttft_ms:.0f} ms, ITL {prediction.itl_ms:.1f} ms")
    return lines


def _alternatives(record: DecisionRecord) -> list[str]:
    settings, load = record.settings, record.observation.load
    if not settings.has_thresholds:
        return []
    lines = []
    depth = finite(load.prefill_queue)
    if record.decision.current.prefill:
        per_worker = None if depth is None else depth / max(1, load.prefill_workers)
        lines.append(
            _thresholds(
                "prefill",
                "queue per worker",
                settings.prefill_queue_scale_up_threshold,
                settings.prefill_queue_scale_down_threshold,
                per_worker,
            )
        )
    lines.append(
        _thresholds(
            "decode",
            "KV usage",
            settings.decode_kv_scale_up_threshold,
            settings.decode_kv_scale_down_threshold,
            finite(load.kv_usage),
        )
    )
    return lines


def _thresholds(role: str, load: str, up: float, down: float, was: float | None) -> str:
    seen = "there was no data" if was is None else f"was {was:.3g}"
    return f"{role}: would scale up at {load} > {up:g}, down at < {down:g}; {seen}"


GATE_STAGES = ("known", "pending", "steady")
"""Stages whose reasons are sentences of their own: their names would tell a reader nothing."""


def _step(step: DecisionStep) -> str:
    return step.why if step.stage in GATE_STAGES else f"{step.stage}: {step.why}"


def _label(step: DecisionStep) -> str:
    return "changed   " if step.before != step.after else "unchanged "
