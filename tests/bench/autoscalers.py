"""Autoscalers to compare with: Kubernetes' HPA and Knative's KPA, with their documented rules and defaults.

Both look at one number per pool and know nothing of SLOs, start-up times or the other pool. They are for our
own comparisons: ``run_policy`` simulates them, or a policy of ``dynaplan simulate``, on the same trace.

HPA, every 15 s: wanted = ceil(workers * metric / target), unless the ratio is within 10 % of 1; at most 4
workers or twice as many per sync upwards; downwards the highest proposal of the last 300 s counts. Source:
Kubernetes documentation, "Horizontal Pod Autoscaling", autoscaling/v2, sections "Algorithm details" and
"Default behavior".

KPA, every 2 s: wanted = ceil(mean requests in flight over 60 s / target per worker). When the mean over the
last 6 s asks for twice the ready workers, it panics: for 60 s the higher of both means counts, and nothing is
removed. Source: Knative Serving documentation, "Autoscaling", and the defaults of its config-autoscaler.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.engines.timing_model.step_timing import StepTiming
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.policy_runs import run_simulations, service_settings
from dynaplan.simulation.run import Result, simulate
from dynaplan.simulation.simulated_service import ServiceSettings, SimulatedService
from dynaplan.simulation.traces.reading import read_requests

HPA_SYNC_S = 15.0
"""Seconds between two syncs of the HPA (``--horizontal-pod-autoscaler-sync-period``)."""

HPA_TOLERANCE = 0.1
"""The distance of metric / target from 1 within which nothing changes (``...-tolerance``)."""

HPA_DOWN_WINDOW_S = 300.0
"""Seconds whose highest proposal counts when scaling down (``stabilizationWindowSeconds``)."""

HPA_UP_WORKERS = 4
"""The most workers added in one sync, unless ``HPA_UP_FACTOR`` allows more."""

HPA_UP_FACTOR = 2.0
"""The largest multiple of the workers that a sync may ask for, unless ``HPA_UP_WORKERS`` allows more."""

HPA_METRICS = {Role.PREFILL: "queue per prefill worker", Role.DECODE: "KV usage of the decode workers"}
"""The metric of each role's pool, in words."""

KPA_TICK_S = 2.0
"""Seconds between two ticks of the KPA."""

KPA_STABLE_S = 60.0
"""Seconds of the stable window (``stable-window``)."""

KPA_PANIC_S = 6.0
"""Seconds of the panic window: 10 % of the stable one (``panic-window-percentage``)."""

KPA_PANIC_FACTOR = 2.0
"""The multiple of the ready workers that makes it panic (``panic-threshold-percentage``: 200 %)."""

KPA_MAX_DOWN_FACTOR = 2.0
"""The most that a tick divides the workers by (``max-scale-down-rate``)."""

HPA_TARGETS = {Role.DECODE: 0.7, Role.PREFILL: 0.35}
"""The HPA's targets, mean KV usage and queue per prefill worker: between the load planner's default
thresholds."""

KPA_UTILIZATION = 0.7
"""The part of a worker's concurrency that the KPA aims at: Knative's
``container-concurrency-target-percentage``."""

KPA_PREFILLS = 2.0
"""The prompts that a prefill worker bears: one that it computes and one that waits."""

KPA_CONTEXT_TOKENS = 2000
"""The context, in tokens, for which the batch of a decode worker is chosen."""


class HpaPolicy:
    """Kubernetes' HorizontalPodAutoscaler v2 with its defaults: ``ceil(workers * metric / target)``.

    The metric of decode workers is the mean KV usage, that of prefill workers the queue per worker. When more
    workers are wanted, starting ones count as idle, so that it does not start too many at once.
    """

    name = "hpa"
    interval_s = HPA_SYNC_S

    def __init__(self, targets: Mapping[Role, float], least: int = 1) -> None:
        self._targets = targets
        self._least = least
        self._proposals: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in targets}
        self.why = ""

    def begin(self, service: SimulatedService) -> None:
        pass

    def evaluate(self, service: SimulatedService) -> None:
        """Compute the wanted workers from the metrics of this moment, and ask for them."""
        sample = service.sample()
        metrics = {
            Role.DECODE: sample.kv_usage,
            Role.PREFILL: None
            if sample.prefill_queue is None
            else sample.prefill_queue / max(1, sample.prefill_workers),
        }
        wanted = {role: self._wanted(service, role, metrics[role]) for role in self._targets}
        fitted = fit_gpus(service, wanted)
        if fitted != service.pools.wanted:
            self.why = reason(service, wanted, fitted, lambda role: self._text(role, metrics[role]))
            service.scale(fitted)

    def _text(self, role: Role, metric: float | None) -> str:
        seen = "unknown" if metric is None else f"{metric:.3g}"
        return f"{HPA_METRICS[role]} {seen}, its target {self._targets[role]:g}"

    def _wanted(self, service: SimulatedService, role: Role, metric: float | None) -> int:
        current, now_s = service.pools.wanted.of(role), service.now_s
        if metric is None or not current:
            return current
        ready = len(service.pools.serving(role))
        ratio = metric / self._targets[role]
        if ratio > 1 and ready < current:
            ratio = ratio * ready / current
        proposal = current if abs(ratio - 1) <= HPA_TOLERANCE else math.ceil(current * ratio - 1e-9)
        proposals = self._proposals[role]
        proposals.append((now_s, proposal))
        while proposals[0][0] < now_s - HPA_DOWN_WINDOW_S:
            proposals.popleft()
        if proposal > current:
            return min(proposal, max(current + HPA_UP_WORKERS, math.ceil(current * HPA_UP_FACTOR)))
        return max(self._least, min(current, max(proposal for _, proposal in proposals)))


class KpaPolicy:
    """Knative's pod autoscaler with its defaults: requests in flight over a target per worker.

    See the module's rules for its two windows and its panic.
    """

    name = "kpa"
    interval_s = KPA_TICK_S

    def __init__(self, targets: Mapping[Role, float], least: int = 1) -> None:
        self._targets = targets
        self._least = least
        self._seen: dict[Role, deque[tuple[float, float]]] = {role: deque() for role in targets}
        self._panic_until_s: dict[Role, float] = dict.fromkeys(targets, float("-inf"))
        self.why = ""

    def begin(self, service: SimulatedService) -> None:
        pass

    def evaluate(self, service: SimulatedService) -> None:
        """Compute the wanted workers from the metrics of this moment, and ask for them."""
        service.advance_decoders(service.now_s)
        waiting = {Role.PREFILL: service.queue_depth, Role.DECODE: service.decoding}
        wanted = {role: self._wanted(service, role, waiting[role]) for role in self._targets}
        fitted = fit_gpus(service, wanted)
        if fitted != service.pools.wanted:
            self.why = reason(service, wanted, fitted, lambda role: self._text(role, service.now_s))
            service.scale(fitted)

    def _text(self, role: Role, now_s: float) -> str:
        panics = ", panicking" if now_s < self._panic_until_s[role] else ""
        stable = fmean(value for _, value in self._seen[role])
        recent = fmean(value for at_s, value in self._seen[role] if at_s >= now_s - KPA_PANIC_S)
        target = self._targets[role]
        return (
            f"{recent:.3g} requests in {role.value} over {KPA_PANIC_S:g} s ({stable:.3g} over "
            f"{KPA_STABLE_S:g} s), its target {target:.3g} per worker{panics}"
        )

    def _wanted(self, service: SimulatedService, role: Role, in_flight: int) -> int:
        now_s, seen = service.now_s, self._seen[role]
        seen.append((now_s, float(in_flight)))
        while seen[0][0] < now_s - KPA_STABLE_S:
            seen.popleft()
        recent = [value for at_s, value in seen if at_s >= now_s - KPA_PANIC_S]
        stable = self._workers(sum(value for _, value in seen) / len(seen), role)
        panic = self._workers(sum(recent) / len(recent), role)
        current = service.pools.wanted.of(role)
        ready = max(1, len(service.pools.serving(role)))
        if panic >= KPA_PANIC_FACTOR * ready:
            self._panic_until_s[role] = now_s + KPA_STABLE_S
        if now_s < self._panic_until_s[role]:
            return max(current, panic, stable)
        return max(stable, math.floor(current / KPA_MAX_DOWN_FACTOR), self._least)

    def _workers(self, in_flight: float, role: Role) -> int:
        return max(self._least, math.ceil(in_flight / self._targets[role] - 1e-9))


def hpa_targets(settings: ServiceSettings) -> dict[Role, float]:
    return {role: HPA_TARGETS[role] for role in settings.gpus_per_worker}


def kpa_targets(settings: ServiceSettings) -> dict[Role, float]:
    """Return the KPA's targets, requests in flight per worker, for the deployment's roles."""
    _, timing = settings.engines[Role.DECODE]
    bearable = {Role.PREFILL: KPA_PREFILLS, Role.DECODE: max_batch_within_itl(timing, settings.slo.itl_ms)}
    return {role: max(1.0, KPA_UTILIZATION * bearable[role]) for role in settings.gpus_per_worker}


def max_batch_within_itl(timing: StepTiming, itl_ms: float, context_tokens: int = KPA_CONTEXT_TOKENS) -> int:
    """Return the largest batch of sequences of that context whose step meets the ITL target; at least 1."""
    batch = 1
    while batch < 4096 and timing.decode_ms(batch + 1, (batch + 1) * context_tokens) <= itl_ms:
        batch += 1
    return batch


def reason(
    service: SimulatedService, wanted: Mapping[Role, int], fitted: PoolSizes, describe: Callable[[Role], str]
) -> str:
    """Return the reason of a change: the description of each role that changes, and whether all fitted."""
    roles = SCALED_ROLES
    texts = [describe(role) for role in roles if fitted.of(role) != service.pools.wanted.of(role)]
    if any(fitted.of(role) < count for role, count in wanted.items()):
        texts.append(f"more were wanted than {service.settings.gpus} GPUs can hold")
    return "; ".join(texts)


def fit_gpus(service: SimulatedService, wanted: Mapping[Role, int]) -> PoolSizes:
    """Return as many of the wanted workers as the box has GPUs for, taken from the larger pool first."""
    widths = service.settings.gpus_per_worker
    targets = dict(wanted)
    while sum(count * widths[role] for role, count in targets.items()) > service.settings.gpus:
        most = max(targets, key=lambda role: targets[role] * widths[role])
        if targets[most] <= 1:
            break
        targets[most] -= 1
    return PoolSizes(targets.get(Role.PREFILL, 0), targets.get(Role.DECODE, 0))


def run_policy(options: SimulateOptions, policy: str) -> Result:
    """Return the result of one policy on the options' trace, whichever those name."""
    options = replace(options, policies=(policy,))
    if policy not in ("hpa", "kpa"):
        [result] = run_simulations(options)
        return result
    settings = service_settings(options)
    scaler = HpaPolicy(hpa_targets(settings)) if policy == "hpa" else KpaPolicy(kpa_targets(settings))
    first = options.first or PoolSizes(int(options.is_disaggregated), 1)
    trace = read_requests(options.trace, options.rate_scale, options.seed)
    return simulate(trace, settings, first, scaler)
