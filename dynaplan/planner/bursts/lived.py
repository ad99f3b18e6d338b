"""The fluid of what was lived: the workers that really served, beside what was counted with them.

**Added workers** take none of the requests that are there already: answers stay with the worker that decodes
them, and prompts with the aggregated worker whose queue they entered. So after a burst has met too few
workers the older ones go on missing targets for minutes, while the fluid of all of them has worked it off.
What is counted then says nothing of the number of workers. The *older* workers are followed in a fluid of
their own, with their share of what comes (routers that look at the load send them less, so that they are
done no later). While one of them has more than all have on average, by a request, nothing counts as evidence.
Prompts of a prefill queue go to whichever worker is free; for them nothing stays behind.

In an interval in which the number changed those serve that were there all the time: when the others came
is not known, and what a burst has left must not be taken for worked off.
"""

from __future__ import annotations

from dataclasses import replace

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.fleet.counts import Targets
from dynaplan.planner.bursts.evidence import SAME
from dynaplan.planner.bursts.interval import Arrived, TriedInterval, fared
from dynaplan.planner.bursts.memory import ExpertTrial, Hedge, Lived, Missed


def lived_through(before: Hedge, came: Arrived, targets: SlaTargets, fade: float) -> tuple[Lived, Arrived]:
    """Return what was lived after the interval, and what came without counts that are no evidence."""
    served = came.served
    if not served.decode:
        return Lived(), came
    meanwhile = _meanwhile(before.lived, served)
    older = _older(before, came, meanwhile)
    alone = replace(
        before, trials=(replace(before.lived.trial, workers=meanwhile, follows=False),), leasts=()
    )
    [(trial, late, long)] = fared(alone, replace(came, counted=None))
    trial = replace(trial, workers=served)
    if _load_of_one(older) > _load_of_one(trial) + SAME:
        came = replace(came, counted=None)
    else:
        older = ExpertTrial()
    counted, lived = came.counted, before.lived
    late, long = (late, long) if counted else (0.0, 0.0)
    after = replace(
        trial,
        late=missed_more(lived.trial.late, late, targets.ttft_rest, came, fade),
        long=missed_more(lived.trial.long, long, targets.itl_rest, came, fade),
    )
    counted_late, counted_long = (counted.late, counted.long) if counted else (0.0, 0.0)
    return Lived(after, fade * lived.late + counted_late, fade * lived.long + counted_long, older), came


def _meanwhile(before: Lived, served: Targets) -> Targets:
    """Return the workers that served all through the interval, at whose end these ones do."""
    earlier = before.trial.workers if before.trial.workers.decode else served
    return Targets(min(earlier.prefill, served.prefill), min(earlier.decode, served.decode))


def _older(before: Hedge, came: Arrived, meanwhile: Targets) -> ExpertTrial:
    """Return the busiest workers from before their number changed, after the interval."""
    lived, served, older = before.lived, came.served, before.lived.older
    if served.decode != lived.trial.workers.decode:
        older = max(lived.trial, older, key=_load_of_one)
    work = came.work
    if not older.workers.decode or work is None:
        return ExpertTrial()
    share = min(1.0, older.workers.decode / meanwhile.decode)
    older = replace(older, follows=False, workers=replace(meanwhile, decode=older.workers.decode))
    if served.prefill:
        queue = lived.trial
        older = replace(older, queue=queue.queue, in_time=queue.in_time, late_s=queue.late_s)
    else:
        came = replace(came, arrivals=[share * each for each in came.arrivals])
    alone = replace(before, trials=(older,), leasts=())
    interval = TriedInterval(alone, replace(came, counted=None), work)
    after, _, computed = interval.queue(older)
    coming = [share * each for each in computed] if served.prefill else computed
    return replace(after, decoding=interval.decoding(older, coming)[0])


def _load_of_one(trial: ExpertTrial) -> float:
    """Return the requests of one decode worker, with the prompts that wait for it alone."""
    queue = 0.0 if trial.workers.prefill else trial.queue
    return (queue + trial.decoding.total) / max(1, trial.workers.decode)


def missed_more(before: Missed, missed: float, rest: float, came: Arrived, fade: float) -> Missed:
    """Return the misses after an interval in which these requests missed."""
    requests, squares = fade * before.requests + missed, fade**2 * before.squares
    if missed <= rest * came.requests:
        return Missed(requests, squares + before.run**2 + missed**2)
    run, run_s = before.run + missed, before.run_s + came.interval_s
    long_s = came.startup_s + came.interval_s
    if run_s // long_s > before.run_s // long_s:
        return Missed(requests, squares + run**2, 0.0, run_s)
    return Missed(requests, squares, run, run_s)
