"""The rivals, and the SLA policy at each rival's attainment and at its GPUs: our promise is swept for it.

The percentile that is promised of both targets goes through ``PROMISES``. Of what comes of it, the cheapest
that meets at least as much as the rival is set beside the rival's GPUs, and the one that meets most with no
more GPUs than the rival's beside its attainment. Nothing is interpolated. Six minutes of CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from dynaplan.fleet.counts import Targets
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.autoscalers import HpaPolicy
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.simulation import best_static, service_settings
from dynaplan.simulation.run import simulate
from dynaplan.simulation.traces.reading import read_requests
from tests.bench.bursts import RULES
from tests.bench.cases import FIRST_CASE, TRACES, hour_of
from tests.bench.standing import Fared, fared, judged
from tests.bench.table import Row

PROMISES = (50.0, 70.0, 80.0, 90.0, 95.0, 99.0)
"""Per cent of the requests, of either target; 95 is the default."""

RIVALS = ("formula", "hpa", "kpa", "load")

HPA_QUEUES = (0.35, 1.0, 3.0, 10.0)
HPA_KV_USAGES = (0.35, 0.7)
"""What the HPA is tuned over: its targets, prompts queued per prefill worker and KV usage."""


def rows(_: int) -> Iterator[Row]:
    """Virtual time: the same on every machine, and measured once."""
    for name in TRACES:
        yield from _beside_rivals(name, hour_of(FIRST_CASE, name))


def _beside_rivals(name: str, hour: SimulateOptions) -> Iterator[Row]:
    rivals = [*(fared(hour, rival) for rival in RIVALS), tuned_hpa(hour)]
    static = best_static(hour).best
    yardstick = judged(static.result, f"best-static:{static}")
    yield _fared(f"{name}, {yardstick.policy}", yardstick)
    for rival in rivals:
        yield _fared(f"{name}, {rival.policy}", rival)
    for rule in ("sla", "sla, no hedge"):
        swept = [promised(hour, rule, percent) for percent in PROMISES]
        for percent, ours in zip(PROMISES, swept, strict=True):
            yield _fared(f"{name}, {rule}, {percent:g} % promised", ours)
        for rival in rivals:
            is_dominated = float(rival.dominates(swept[PROMISES.index(95.0)]))
            yield Row(f"{name}, {rule}: dominated by {rival.policy}", "", [is_dominated], 0.0)
            yield from _beside(f"{name}, {rule} beside {rival.policy}", swept, rival)
        over = most_at(swept, yardstick.gpus) / yardstick.met
        yield Row(
            f"{name}, {rule}: attainment at best-static's GPUs over its own", "x", [over], more_is_better=True
        )


def _fared(name: str, ours: Fared) -> Row:
    return Row(
        f"{name}: within both targets", "", [ours.met], more_is_better=True, note=f"{ours.gpus:.2f} GPUs"
    )


def _beside(name: str, swept: Sequence[Fared], rival: Fared) -> Iterator[Row]:
    gpus = min((ours.gpus for ours in swept if ours.met >= rival.met), default=float("inf"))
    more = most_at(swept, rival.gpus) - rival.met
    yield Row(f"{name}: GPUs at its attainment over its own", "x", [gpus / rival.gpus], 1.0)
    yield Row(f"{name}: attainment at its GPUs less its own", "", [more], 0.0, True)


def most_at(swept: Sequence[Fared], gpus: float) -> float:
    """Return the most within both targets of those that took no more GPUs; 0 where all took more."""
    return max((ours.met for ours in swept if ours.gpus <= gpus + 1e-6), default=0.0)


def promised(hour: SimulateOptions, rule: str, percent: float) -> Fared:
    """Simulate the SLA policy with that percentage of the requests promised, of either target."""
    promise = {"ttft-percentile": percent, "itl-percentile": percent}
    return fared(replace(hour, planner={**RULES[rule], **promise}), "sla")


def tuned_hpa(hour: SimulateOptions) -> Fared:
    """Return the HPA with the best of the targets that it is tuned over, known only afterwards.

    Which is the cheapest with 95 per cent of the requests within both targets; where there is none, the one
    with the most.
    """
    tried = [_hpa(hour, queue, kv_usage) for queue, kv_usage in product(HPA_QUEUES, HPA_KV_USAGES)]
    return min(tried, key=lambda each: (each.met < 0.95, each.gpus if each.met >= 0.95 else -each.met))


def _hpa(hour: SimulateOptions, queue: float, kv_usage: float) -> Fared:
    trace = read_requests(hour.trace, hour.rate_scale, hour.seed)
    policy = HpaPolicy({Role.PREFILL: queue, Role.DECODE: kv_usage})
    return judged(
        simulate(trace, service_settings(hour), Targets(1, 1), policy), f"hpa {queue:g}, {kv_usage:g}"
    )
