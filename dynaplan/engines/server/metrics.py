"""Reads an engine's load and progress from its ``/metrics``, by the names of its version."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dynaplan.engines.engine_counters import EngineCounters
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.util.prometheus_text import read_samples

Names = tuple[str, ...]
"""The names of one signal over an engine's versions, tried in order; the first that is there counts."""

Labelled = tuple[Mapping[str, str], float]


@dataclass(frozen=True)
class CounterNames:
    """One engine's names for what it counts of its steps (``engine_counters``), of all its versions.

    ``generated`` are all tokens of answers; with ``prompts`` (their number) the first ones are left out.
    ``sequences_per_step`` is a mean over all steps, in place of ``generated``. ``mode_label`` tells samples
    of one name apart: those of ``decode`` and of ``prefill_compute`` count.
    """

    steps: Names = ()
    generated: Names = ()
    sequences_per_step: Names = ()
    prompt_tokens: Names = ()
    cached_tokens: Names = ()
    prompts: Names = ()
    mode_label: str = ""

    @property
    def wanted(self) -> Names:
        tokens = (*self.prompt_tokens, *self.cached_tokens, *self.prompts)
        return (*self.steps, *self.generated, *self.sequences_per_step, *tokens)

    def read(
        self, found: Mapping[str, Sequence[Labelled]], kv_tokens: float, kv_capacity_tokens: float
    ) -> EngineCounters | None:
        """Return the counters; None where the engine counts neither prompts nor answers."""

        def total(tried: Names, mode: str = "") -> float:
            samples = next((found[name] for name in tried if name in found), ())
            if self.mode_label and mode:
                samples = [each for each in samples if each[0].get(self.mode_label) == mode]
            return _sum(samples)

        if not any(name in found for name in (*self.prompt_tokens, *self.generated)):
            return None
        steps, prompts = total(self.steps), total(self.prompts)
        generated = max(0.0, total(self.generated, "decode") - (0.0 if self.mode_label else prompts))
        computed = total(self.prompt_tokens, "prefill_compute") - total(self.cached_tokens)
        return EngineCounters(
            steps=steps,
            decoded_tokens=steps * total(self.sequences_per_step) if self.sequences_per_step else generated,
            prompt_tokens=max(0.0, computed),
            prompts=prompts,
            kv_tokens=kv_tokens,
            kv_capacity_tokens=kv_capacity_tokens,
        )


@dataclass(frozen=True)
class MetricNames:
    """One engine's names for the signals. An empty tuple: the engine has no such metric.

    Counts and counters are summed over label sets (several engines behind one port); of ``kv_usage`` the
    largest counts. ``waiting_besides`` are further queues, added to ``waiting`` where they are. ``kv_active``
    and ``kv_total`` are blocks, or tokens where the engine counts tokens. ``kv_info`` is a metric whose
    *labels* hold the size of the KV cache: ``info_blocks``, or ``info_tokens`` divided by
    ``info_block_tokens``. ``prefix_hits`` and ``prefix_queries`` are tokens since the start,
    ``prefix_hit_rate`` is a gauge from 0 to 1, ``generated`` counts tokens since the start. At least one
    ``progress`` counter moves with every step of a busy engine; each has its own names over versions.
    ``samples`` are passed on as they are, summed over
    label sets. ``sleep_state`` is a gauge with a label of that name; the one of ``awake`` is 0 while the
    engine sleeps, the one of ``discard_all`` is 1 while it sleeps without its weights.
    """

    running: Names
    waiting: Names = ()
    waiting_besides: Names = ()
    kv_usage: Names = ()
    kv_active: Names = ()
    kv_total: Names = ()
    kv_info: Names = ()
    info_blocks: str = "num_gpu_blocks"
    info_tokens: str = "kv_cache_size_tokens"
    info_block_tokens: str = "block_size"
    prefix_hits: Names = ()
    prefix_queries: Names = ()
    prefix_hit_rate: Names = ()
    generated: Names = ()
    progress: tuple[Names, ...] = ()
    samples: Names = ()
    sleep_state: Names = ()
    counters: CounterNames = CounterNames()

    @cached_property
    def wanted(self) -> frozenset[str]:
        single = (
            *(self.running, self.waiting, self.waiting_besides, self.kv_usage, self.kv_active, self.kv_total),
            *(self.kv_info, self.prefix_hits, self.prefix_queries, self.prefix_hit_rate, self.samples),
            *(self.sleep_state, self.generated, self.counters.wanted),
        )
        return frozenset(name for names in (*single, *self.progress) for name in names)


@dataclass(frozen=True)
class EngineMetrics:
    """One reading. ``kv_usage`` and ``prefix_hit_rate`` are fractions from 0 to 1.

    ``kv_active`` and ``kv_total`` are blocks, or tokens where the engine counts tokens; ``block_tokens`` is
    the size of a block, 0 when it is unknown. ``request_slots`` is 0 where the engine does not say how many
    requests it computes at once. ``progress`` differs between two readings if the engine has
    done anything; it is empty if the engine has no progress counter. ``samples`` are for ``/metrics``, by
    the engine's own names. ``missing`` are the signals that the text lacks, each as
    ``signal (names that were tried)``. Nothing moves in an engine that ``is_asleep``; one without weights
    would answer nonsense when it is awake.
    """

    running: int = 0
    waiting: int = 0
    request_slots: int = 0
    kv_usage: float = 0.0
    kv_active: int = 0
    kv_total: int = 0
    block_tokens: int = 0
    prefix_hit_rate: float = 0.0
    generated: int = 0
    progress: tuple[float, ...] = ()
    samples: Mapping[str, float] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    is_asleep: bool = False
    has_weights: bool = True
    counters: EngineCounters | None = None

    def load(self, request_slots: int = 0) -> WorkerLoad:
        return WorkerLoad(
            running_requests=self.running,
            request_slots=self.request_slots or request_slots,
            waiting_requests=self.waiting,
            kv_active_blocks=self.kv_active,
            kv_total_blocks=self.kv_total,
            kv_usage=self.kv_usage,
            prefix_hit_rate=self.prefix_hit_rate,
            is_asleep=self.is_asleep,
            generated_tokens=self.generated,
            counters=self.counters,
        )


def read_metrics(text: str, names: MetricNames) -> EngineMetrics:
    """Read the signals in a ``/metrics`` text; a missing one is 0. Never raises, whatever the text is."""
    found = _samples(text, names.wanted)
    missing: list[str] = []

    def first(signal: str, tried: Names) -> Sequence[Labelled]:
        for name in tried:
            if name in found:
                return found[name]
        if tried:
            missing.append(f"{signal} ({', '.join(tried)})")
        return ()

    kv_usage = _fraction(max(_values(first("kv_usage", names.kv_usage)), default=0.0))
    blocks, block_tokens = _cache_size(first("kv_info", names.kv_info), names)
    kv_total = int(_sum(first("kv_total", names.kv_total))) or blocks
    kv_active = int(_sum(first("kv_active", names.kv_active))) or round(kv_usage * kv_total)
    states = [sample for name in names.sleep_state for sample in found.get(name, ())]
    generated = next((_sum(found[name]) for name in names.generated if name in found), 0.0)
    besides = sum(_sum(found.get(name, ())) for name in names.waiting_besides)
    return EngineMetrics(
        running=int(_sum(first("running", names.running))),
        waiting=int(_sum(first("waiting", names.waiting)) + besides),
        kv_usage=kv_usage,
        kv_active=kv_active,
        kv_total=kv_total,
        block_tokens=block_tokens,
        prefix_hit_rate=_hit_rate(
            _sum(first("prefix_hits", names.prefix_hits)),
            _sum(first("prefix_queries", names.prefix_queries)),
            max(_values(first("prefix_hit_rate", names.prefix_hit_rate)), default=0.0),
        ),
        generated=int(generated),
        progress=tuple(_sum(each) for tried in names.progress if (each := first("progress", tried))),
        samples={name: _sum(found[name]) for name in names.samples if name in found},
        missing=tuple(missing),
        is_asleep=any(_says(sample, "awake", 0) for sample in states),
        has_weights=not any(_says(sample, "discard_all", 1) for sample in states),
        counters=names.counters.read(found, kv_active * (block_tokens or 1), kv_total * (block_tokens or 1)),
    )


def _samples(text: str, wanted: frozenset[str]) -> dict[str, list[Labelled]]:
    found: dict[str, list[Labelled]] = {}
    for name, labels, value in read_samples(text, wanted.__contains__):
        found.setdefault(name, []).append((labels, value))
    return found


def _values(samples: Iterable[Labelled]) -> Iterable[float]:
    return (value for _, value in samples)


def _says(sample: Labelled, state: str, value: float) -> bool:
    labels, found = sample
    return labels.get("sleep_state") == state and found == value


def _sum(samples: Iterable[Labelled]) -> float:
    return max(0.0, math.fsum(_values(samples)))


def _cache_size(info: Sequence[Labelled], names: MetricNames) -> tuple[int, int]:
    """Count the blocks of all engines together, and the tokens of one block; 0 for a missing label."""
    blocks = block_tokens = 0
    for labels, _ in info:
        block_tokens = _whole(labels.get(names.info_block_tokens)) or block_tokens
        tokens = _whole(labels.get(names.info_tokens))
        blocks += _whole(labels.get(names.info_blocks)) or (tokens // block_tokens if block_tokens else 0)
    return blocks, block_tokens


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _hit_rate(hits: float, queries: float, gauge: float) -> float:
    return _fraction(hits / queries if queries else gauge)


def _fraction(value: float) -> float:
    return min(1.0, max(0.0, value))
