"""Random changes of a schedule, to look for a cheaper one than the oracle's, and traces to try them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

from dynaplan.fleet.counts import Targets
from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.lab.simulate.oracle.oracle import Oracle
from dynaplan.lab.simulate.oracle.schedule import SchedulePolicy
from dynaplan.lab.simulate.run import Result, simulate
from dynaplan.simulation.service import ServiceSettings

Entries = tuple[tuple[float, Targets], ...]
Trace = Callable[[], Sequence[TracedRequest]]

LONGEST_SHIFT_S = 20


def bursts(seed: int, *, prefixes: int = 0, length_s: float = 240.0) -> list[TracedRequest]:
    """Requests at 1 or 6 a second in turns, for 20 to 60 s each. With ``prefixes`` prompts are of 208 tokens,
    160 of them one of so many prefixes."""
    random = Random(seed)
    at_s, until_s, rate, trace = 0.0, 0.0, 6.0, []
    while at_s < length_s:
        if at_s >= until_s:
            until_s, rate = at_s + random.uniform(20, 60), 7.0 - rate
        at_s += random.expovariate(rate)
        if prefixes:
            shared = 1000 * random.randrange(prefixes)
            own = [10**6 * (len(trace) + 1) + block for block in range(3)]
            hashes = (*range(shared, shared + 10), *own)
            trace.append(TracedRequest(at_s, 208, random.randrange(2, 20), hashes, 16))
        else:
            trace.append(TracedRequest(at_s, random.randrange(50, 366), random.randrange(2, 20)))
    return trace


def changed(entries: Entries, random: Random, end_s: float) -> Entries:
    """Return the schedule with one to three changes: an edge moved, a worker more or less for a time."""
    moments = dict(entries)
    for _ in range(random.randint(1, 3)):
        kind = random.random()
        if kind < 0.5 and len(moments) > 1:
            at_s = random.choice(sorted(moments)[1:])
            wanted = moments.pop(at_s)
            shift_s = random.randint(-LONGEST_SHIFT_S, LONGEST_SHIFT_S)
            if kind > 0.1:  # else it is left out
                moments[max(1.0, at_s + shift_s)] = wanted
            continue
        first_s, last_s = sorted(float(random.randrange(0, int(end_s) + 1)) for _ in range(2))
        prefill, decode = random.choice([(-1, 0), (0, -1), (-1, 0), (0, -1), (1, 0), (0, 1)])
        for edge_s in (first_s, last_s):
            moments.setdefault(edge_s, _wanted_at(moments, edge_s))
        for at_s in moments:
            if first_s <= at_s < last_s:
                old = moments[at_s]
                floor = 1 if old.prefill else 0
                moments[at_s] = Targets(
                    max(floor, old.prefill + prefill) if floor else 0, max(1, old.decode + decode)
                )
    return tuple(sorted(moments.items()))


def _wanted_at(moments: dict[float, Targets], at_s: float) -> Targets:
    return moments[max(moment for moment in moments if moment <= at_s)]


def cheaper(
    oracle: Oracle, trace: Trace, settings: ServiceSettings, count: int, seed: int
) -> Iterator[tuple[Entries, Result]]:
    """Yield the random changes that meet the SLO for fewer GPU-hours; each goes on from the best so far."""
    random, requests = Random(seed), trace()
    best_hours, best = oracle.result.gpu_hours, oracle.schedule
    least = oracle.verdict.percentile / 100
    for _ in range(count):
        entries = changed(best, random, requests[-1].arrival_s)
        result = simulate(requests, settings, entries[0][1], SchedulePolicy("changed", entries))
        outcome = result.outcome
        met = min(outcome.attainment(outcome.ttft_met), outcome.attainment(outcome.itl_met))
        if met >= least and result.gpu_hours < best_hours:
            best_hours, best = result.gpu_hours, entries
            yield entries, result
