"""One simulation for each policy, and the figures of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from dynaplan.models.model import NO_CONSTRAINTS, Constraints, Device
from dynaplan.simulation.many_models.box import Box, BoxPolicy, SimulatedCall, SimulatedModel
from dynaplan.simulation.many_models.call_chains import Chain
from dynaplan.simulation.many_models.policies import Dynaplan, OwnGpu


@dataclass(frozen=True)
class BoxOutcome:
    """What came of all requests under one policy.

    A *wait* is the time from a request's arrival until a worker took it. ``lost`` is the number that were
    refused, cut, or never answered. ``hits`` is the part of all requests that found their model ready,
    ``in_time`` the part whose TTFT was at most twice that of a ready model with a free slot. ``gpu_hours``
    are the hours of whole GPUs that the held memory makes.
    """

    policy: str
    requests: int
    lost: int
    hits: float
    in_time: float
    wait_p50_s: float
    wait_p95_s: float
    wait_longest_s: float
    loads: int
    swaps_per_hour: float
    gpu_hours: float


IN_TIME_FACTOR = 2.0


def compare(
    chains: Callable[[], Iterable[Chain]],
    models: Mapping[str, SimulatedModel],
    devices: Sequence[Device],
    duration_s: float,
    policies: Sequence[BoxPolicy] = (Dynaplan(),),
    constraints: Constraints = NO_CONSTRAINTS,
) -> list[BoxOutcome]:
    """Run the load under each policy, by default the rules of a deployment.

    Last comes a box with GPUs of its own for each model.
    """
    outcomes = [simulate(chains(), models, devices, duration_s, policy, constraints) for policy in policies]
    size = max(each.total_bytes for each in devices)
    gpus = sum(each.settings.devices for each in models.values())
    own = [Device(index, size) for index in range(gpus)]
    alone = simulate(chains(), models, own, duration_s, OwnGpu())
    return [*outcomes, replace(alone, gpu_hours=gpus * duration_s / 3600)]


def simulate(
    chains: Iterable[Chain],
    models: Mapping[str, SimulatedModel],
    devices: Sequence[Device],
    duration_s: float,
    policy: BoxPolicy,
    constraints: Constraints = NO_CONSTRAINTS,
) -> BoxOutcome:
    box = Box(tuple(devices), models, policy, constraints)
    box.run(chains, duration_s)
    return outcome_of(box, policy.name, duration_s)


def outcome_of(box: Box, name: str, duration_s: float) -> BoxOutcome:
    answered = [each for each in box.requests if each.end_s < inf and not each.refused and not each.is_cut]
    waits = sorted(each.admitted_s - each.arrival_s for each in answered)
    number = max(1, len(box.requests))
    hours = duration_s / 3600
    swaps = box.loads - len({each.call.model for each in box.requests})
    size = max(each.total_bytes for each in box.devices)
    return BoxOutcome(
        policy=name,
        requests=len(box.requests),
        lost=len(box.requests) - len(answered),
        hits=sum(each.was_ready for each in box.requests) / number,
        in_time=sum(_is_in_time(box, each) for each in answered) / number,
        wait_p50_s=_percentile(waits, 0.5),
        wait_p95_s=_percentile(waits, 0.95),
        wait_longest_s=waits[-1] if waits else 0.0,
        loads=box.loads,
        swaps_per_hour=max(0, swaps) / hours if hours else 0.0,
        gpu_hours=box.byte_seconds / size / 3600,
    )


def _is_in_time(box: Box, request: SimulatedCall) -> bool:
    warm_s = box.workers[request.call.model].model.ttft_s(request.call)
    return request.begun_s + warm_s - request.arrival_s <= IN_TIME_FACTOR * warm_s


def _percentile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0
