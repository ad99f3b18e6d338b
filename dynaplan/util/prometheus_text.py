"""Prometheus' text format: a worker's metrics written by hand, and the samples of any program read.

There is one other reader, of a frontend's counts alone, once a second (``planner.metrics.exposition``): it
finds those of three models by one expression in 0.7 ms, where the library's parser takes 5.2 ms for the same
lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4"

PREFIX = "dynamo_component_"

_SUMMARY = ("_sum", "_count")
_SUMMARY_MARK = " summary"


def render(values: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """One sample per name, all with the same labels, under its help text and type.

    A name that ends in ``_total`` is a counter. Samples of an engine's histogram, ``_sum`` and ``_count``,
    are a summary without quantiles. A name may have a label of its own (``labelled``).
    """
    written = ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
    families: dict[str, list[str]] = {}
    for sample, value in values.items():
        name, _, own = sample.partition("{")
        both = ",".join(filter(None, (written, own.removesuffix("}"))))
        families.setdefault(_family(name), []).append(f"{name}{{{both}}} {value:.17g}\n")
    return "".join(f"{_head(name)}{''.join(samples)}" for name, samples in families.items())


def read_samples(
    text: str, is_wanted: Callable[[str], bool]
) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Yield name, labels and value of the samples whose name is wanted, those with a finite value.

    Other lines are not parsed, and broken ones are left out: what another program writes may be anything.
    """
    from prometheus_client.parser import text_string_to_metric_families  # 30 ms that few processes need

    for line in text.splitlines():
        if not is_wanted(line.partition("{")[0].partition(" ")[0]):
            continue
        try:
            # A line at a time: over a whole text the parser ends at the first line that is broken.
            found = [each for family in text_string_to_metric_families(line) for each in family.samples]
        except (ValueError, IndexError, KeyError, TypeError, AttributeError):
            continue
        for sample in found:
            if math.isfinite(sample.value):
                yield sample.name, sample.labels, float(sample.value)


def labelled(values: Mapping[str, float], label: str, value: str) -> dict[str, float]:
    """Return the same samples with one more label."""
    return {f'{name}{{{label}="{escaped(value)}"}}': number for name, number in values.items()}


def _family(sample: str) -> str:
    for suffix in _SUMMARY:
        if sample.endswith(suffix):
            return sample.removesuffix(suffix) + _SUMMARY_MARK
    return sample


def _head(family: str) -> str:
    name = family.removesuffix(_SUMMARY_MARK)
    kind = "summary" if name != family else "counter" if name.endswith("_total") else "gauge"
    return f"# HELP {name} {help_of(name)}\n# TYPE {name} {kind}\n"


def escaped(text: str) -> str:
    """Return a label's value as it stands between its quotes."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


_COMPONENT = {
    "request_active_slots": "Requests that the engine computes now",
    "request_total_slots": "Requests that the engine can compute at once",
    "num_requests_waiting": "Requests that wait in the engine",
    "kvstats_active_blocks": "Blocks of the KV cache in use",
    "kvstats_total_blocks": "Blocks of the KV cache",
    "kvstats_gpu_cache_usage_percent": "Part of the KV cache in use, 0 to 1",
    "kvstats_gpu_prefix_cache_hit_rate": "Part of the prompts' tokens found in the KV cache, 0 to 1",
    "events_published_total": "Events that this process has published",
    "events_dropped_total": "Events dropped before they were sent, while the server was away for too long",
    "events_waiting": "Events that wait to be sent",
    "events_received_total": "Events that this process has received",
    "events_missed_total": "Events that did not come here: published before the subscription, or lost",
    "events_unreadable_total": "Messages that are no events, or cannot be read",
    "inflight_requests": "Requests accepted by this process and not answered yet",
}
_PLANNER = {
    "num_prefill_replicas": "Prefill workers that are registered",
    "num_decode_replicas": "Decode workers that are registered",
    "predicted_num_prefill_replicas": "Prefill workers that the last decision asked for",
    "predicted_num_decode_replicas": "Decode workers that the last decision asked for",
    "prefill_queue_size": "Prompts in the prefill queue",
    "gpu_seconds_total": "Seconds of GPUs used by workers since the planner started",
    "observed_requests_per_second": "Requests per second in the last interval",
    "observed_ttft_ms": "Mean time to first token in the last interval, milliseconds",
    "observed_itl_ms": "Mean inter-token latency in the last interval, milliseconds",
    "observed_request_duration_seconds": "Mean duration of requests in the last interval",
    "observed_input_sequence_tokens": "Mean length of prompts in the last interval",
    "observed_output_sequence_tokens": "Mean length of answers in the last interval",
    "predicted_requests_per_second": "Requests per second forecast for the next interval",
    "predicted_input_sequence_tokens": "Mean length of prompts forecast for the next interval",
    "predicted_output_sequence_tokens": "Mean length of answers forecast for the next interval",
    "estimated_ttft_ms": "Time to first token that the model expects of the decision, milliseconds",
    "estimated_itl_ms": "Inter-token latency that the model expects of the decision, milliseconds",
    "sla_target_ttft_ms": "Target of the time to first token, milliseconds",
    "sla_target_itl_ms": "Target of the inter-token latency, milliseconds",
    "prefill_correction_factor": "Measured over profiled time of a prefill step",
    "decode_correction_factor": "Measured over profiled time of a decode step",
    "error_budget_ttft_requests": "Requests that may still miss the target of the time to first token",
    "error_budget_itl_requests": "Requests that may still miss the target of the inter-token latency",
}
_DYNAPLAN = {
    "remote_prefills_taken_total": "KV entries taken over from prefill workers",
    "remote_prefill_fallbacks_total": "Prompts computed here because their KV entries were lost",
    "kv_transfer_seconds_total": "Time spent on taking over KV entries",
    "kv_hand_offs_held": "Hand-offs that wait for their decode worker",
    "kv_hand_offs_expired_total": "Hand-offs that nobody took in time",
    "kv_slots_reserved": "Slots of llama.cpp reserved for requests on their way",
    "kv_slots_taken_back_total": "Reserved slots whose request did not come in time",
    "kv_blocks_cached": "KV blocks that the engine holds, as it reported",
    "kv_block_events_total": "Events about KV blocks sent to frontends",
    "kv_engine_messages_total": "Messages about KV blocks received from the engine",
    "kv_engine_messages_lost_total": "Messages about KV blocks that the engine sent and that did not arrive",
    "kv_engine_messages_unreadable_total": "Messages about KV blocks that could not be read",
    "kv_engine_blocks_skipped_total": "KV blocks of the engine that routing does not count",
    "kv_index_blocks": "KV blocks of all workers that this frontend knows",
    "kv_index_workers": "Workers whose KV blocks this frontend follows",
    "kv_index_workers_current": "Workers of whose KV blocks this frontend has missed nothing",
    "kv_index_events_total": "Events about KV blocks received from workers",
    "kv_index_events_unreadable_total": "Events about KV blocks that could not be read",
    "kv_index_gaps_total": "Times that events about KV blocks were missed",
    "kv_index_snapshots_total": "Whole lists of KV blocks taken over from workers",
}

HELP = {
    **{f"dynamo_component_{name}": text for name, text in _COMPONENT.items()},
    **{f"dynamo_planner_{name}": text for name, text in _PLANNER.items()},
    **{f"dynaplan:{name}": text for name, text in _DYNAPLAN.items()},
    "llamacpp:kv_cache_usage_ratio": "Part of the KV cache in use, 0 to 1",
}
"""The help text of every metric that dynaplan itself reports there."""

_PARTS = re.compile(r"[:_]+")


def help_of(name: str) -> str:
    """Return the help text of a metric; that of an engine's own, or of a user's service, is its name."""
    source, _, rest = name.partition(":")
    words = " ".join(_PARTS.split(rest or name))
    return HELP.get(name) or (f"{words}, as {source} counts it" if rest else words)
