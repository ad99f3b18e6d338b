"""Further workers of a model that has one: how many it wants, and whose memory they may take.

A model has one *pool* of workers, or two: those that decode, and prefill workers, where it is disaggregated.
A model is loaded by its first decode worker, which computes prompts itself for as long as there is no prefill
worker: so every other worker is a further one, in either pool.

How many workers a pool wants, up to its ``max_workers``, is what the model's planner says, where it has one.
Else it wants a further one while the model's requests are more than ``requests_per_worker`` for each that it
has; one prefill worker is always wanted. A further worker is a ``ModelStatus`` of its own, with
``replica_of``, and holds memory as a model does; it differs from a model's last decode worker in what is
lost:

1. Models without a worker come first: they are served as if no further worker were wanted, and any further
   worker may leave for them at once. What it answers is finished, and the others of its model go on.
2. A further worker takes free memory. It takes that of another pool's further worker only where the
   *pressure* without that one, ``priority x workers wanted / workers left``, stays below its own pool's
   pressure now. So the highest pressure falls with each exchange, and none is undone. (By requests, the
   workers wanted are a fraction, ``requests / requests_per_worker``.) The pressure of a disaggregated model
   without a prefill worker is infinite: its first one comes before every pool's second worker.
3. It never takes the place of a model's last decode worker: that has its ``ttl``.
4. One that a planner does not want any more leaves at once, for planners have a memory of their own; one
   that requests have not wanted for ``SHRINK_AFTER_S`` leaves then.
5. Prefill workers come along with the first decode worker of their model, and leave with the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, inf

from dynaplan.config.settings.models import prefill_pool_name
from dynaplan.models.model import ModelPolicy, ModelState, ModelStatus
from dynaplan.models.rules.draft import Draft
from dynaplan.models.rules.eviction import choose, must_leave
from dynaplan.models.rules.ladder import idle_until_s
from dynaplan.models.rules.memory import Need, has_room
from dynaplan.models.rules.turns import count

SERVING = (ModelState.LOADING, ModelState.READY)
"""The states of a worker that answers, or will."""


def replica_name(pool: str, number: int) -> str:
    """Return what the pool's worker of that number is called, from 1; the first goes by the pool's name."""
    return pool if number == 1 else f"{pool} (worker {number})"


def wanted_workers(policy: ModelPolicy, requests: int, planned: int | None = None) -> int:
    """Return how many workers a loaded pool should have: ``planned``, else enough for its ``requests``.

    Those are the running and the waiting ones.
    """
    wanted = ceil(requests / policy.requests_per_worker) if planned is None else planned
    return min(policy.max_workers, max(1, wanted))


def as_replica(
    status: ModelStatus, name: str, model: ModelStatus, is_wanted: bool, is_prefill: bool = False
) -> ModelStatus:
    """Return the status of a worker as a further one of the model.

    Owner and requests ask for the model, not for it. One that ``is_wanted`` counts as busy while the model
    is.
    """
    return replace(
        status,
        name=name,
        replica_of=model.name,
        is_prefill=is_prefill,
        in_flight=min(1, model.in_flight) if is_wanted else 0,
        waiting=0,
        oldest_arrival_s=inf,
        waiting_since_s=inf,
        load_asked_s=None,
        keep_until_s=0.0,
        keep_alive_s=None,
    )


@dataclass(frozen=True)
class _Pool:
    """The decode workers of a model, or its prefill workers."""

    model: ModelStatus
    policy: ModelPolicy
    is_prefill: bool = False

    @property
    def name(self) -> str:
        return prefill_pool_name(self.model.name) if self.is_prefill else self.model.name

    @property
    def planned(self) -> int | None:
        return self.model.planned_prefill_workers if self.is_prefill else self.model.planned_workers

    @property
    def requests(self) -> int:
        return self.model.in_flight + self.model.waiting

    @property
    def wanted(self) -> int:
        return wanted_workers(self.policy, self.requests, self.planned)

    def has(self, worker: ModelStatus) -> bool:
        """Tell whether the worker is one of the pool."""
        is_of_model = self.model.name in (worker.name, worker.replica_of)
        return is_of_model and worker.is_prefill == self.is_prefill

    def serving(self, draft: Draft) -> list[str]:
        """Return the pool's workers that serve and are not to leave."""
        return [
            name
            for name, each in draft.statuses.items()
            if self.has(each) and each.state in SERVING and name in draft.future
        ]

    def pressure(self, draft: Draft, fewer: int = 0) -> float:
        """Return the pool's pressure (rule 2 of the module) if it had ``fewer`` workers less."""
        left = len(self.serving(draft)) - fewer
        if self.is_prefill and left < 1:
            return inf
        wanted = float(self.planned or 0)
        if self.planned is None:
            wanted = self.requests / self.policy.requests_per_worker
        return self.policy.priority * wanted / max(1, left)


def add_replicas(draft: Draft) -> None:
    """Have each pool that wants more workers start one more, where there is room or it can be made.

    Before that, further workers that planners do not want any more leave.
    """
    pools = list(_pools(draft))
    for pool in pools:
        if pool.planned is not None:
            _remove_unplanned(draft, pool)
    for pool in sorted(pools, key=lambda each: (-each.pressure(draft), each.name)):
        if _may_grow(draft, pool) and len(pool.serving(draft)) < pool.wanted:
            _add(draft, pool)


def put_away_prefill_workers(draft: Draft) -> None:
    """Unload the prefill workers of each model that has no decode worker, and for which none is planned."""
    for pool in _pools(draft):
        decode = replace(pool, is_prefill=False)
        if pool.is_prefill and pool.model.name not in draft.future and not decode.serving(draft):
            for name in pool.serving(draft):
                draft.unload(name, "replica", f"{pool.model.name} has no decode worker any more")


def _pools(draft: Draft) -> Iterable[_Pool]:
    for status in draft.statuses.values():
        if not status.replica_of:
            policy = draft.settings(status.name)
            yield _Pool(status, policy)
            if policy.prefill:
                yield _Pool(status, replace(policy.prefill, priority=policy.priority), is_prefill=True)


def _may_grow(draft: Draft, pool: _Pool) -> bool:
    """Tell whether the pool's model is there to stay; for prefill workers its first load suffices."""
    model = pool.model
    is_coming = model.state is ModelState.LOADING or model.name in draft.started
    is_there = model.state is ModelState.READY or (pool.is_prefill and is_coming)
    is_over = idle_until_s(draft.settings(model.name), model) <= draft.now_s
    return is_there and model.name in draft.future and not is_over


def _remove_unplanned(draft: Draft, pool: _Pool) -> None:
    """Have the further workers leave that are more than the planner wants, the last first."""
    serving = pool.serving(draft)
    further = [name for name in serving if name != pool.model.name and name not in draft.settled]
    for name in further[::-1][: max(0, len(serving) - pool.wanted)]:
        draft.unload(name, "replica", f"its planner wants {_workers(pool.wanted, pool)}")


def _workers(number: int, pool: _Pool) -> str:
    noun = "prefill worker" if pool.is_prefill else "worker"
    return f"1 {noun}" if number == 1 else f"{number or 'no'} {noun}s"


def _add(draft: Draft, pool: _Pool) -> None:
    model, name = pool.model, _next_name(draft, pool)
    status = draft.statuses.get(name) or ModelStatus(name, replica_of=model.name, is_prefill=pool.is_prefill)
    if not pool.is_prefill and name not in draft.statuses:
        status = replace(status, learnt=model.learnt)
    if status.retry_at_s > draft.now_s:
        return
    has = len(pool.serving(draft))
    why = f"{count(pool.requests)} for {_workers(has, pool)}"
    if pool.is_prefill and not has:
        why = f"{model.name} has no prefill worker"
    elif pool.planned is not None:
        why = f"its planner wants {_workers(pool.wanted, pool)}, and it has {has}"
    draft.add(status)
    if _is_kept_apart(draft, model.name):
        draft.say(name, "replica", f"{why}, and what is loaded may not be beside it")
    else:
        _find_room(draft, pool, draft.needs[name], why)


def _find_room(draft: Draft, pool: _Pool, wanted: Need, why: str) -> None:
    """Start the further worker where there is room; else hold room that will be free, or make it."""
    rooms = [each for each in draft.devices if has_room(wanted, each, draft.present)]
    choice = choose(wanted, rooms, draft.future, [])
    if choice is not None:
        draft.start(wanted, choice.devices, f"{why}; there is room")
        return
    choice = choose(wanted, draft.devices, draft.future, _displaceable(draft, pool))
    if choice is None:
        draft.say(wanted.model, "replica", f"{why}, and there is no room")
        return
    for leaving in choice.leaving:
        other = draft.model_of(leaving)
        draft.unload(leaving, "replica", f"makes room for {wanted.model}: {other} needs it less")
    draft.hold(wanted, choice.devices)
    draft.say(wanted.model, "replica", f"{why}; waits for the memory of {', '.join(draft.drainers)}")


def _next_name(draft: Draft, pool: _Pool) -> str:
    """Return the name of the pool's next further worker: one that has failed, or that nobody has."""
    names = (replica_name(pool.name, number) for number in itertools.count(1 if pool.is_prefill else 2))
    known = draft.statuses
    return next(each for each in names if each not in known or known[each].state is ModelState.FAILED)


def _is_kept_apart(draft: Draft, model: str) -> bool:
    """Tell whether the owner's constraints forbid the model beside what is loaded, or will be."""
    loaded = {draft.model_of(each) for each in (*draft.present, *draft.future)} - {model}
    return bool(must_leave(draft.constraints, model, sorted(loaded), {}))


def _displaceable(draft: Draft, pool: _Pool) -> list[str]:
    """Return further workers that their pools need less than this one, the least needed first: one a pool."""
    found = []
    for other in _pools(draft):
        further = [name for name in _further(draft) if other.has(draft.statuses[name])]
        lost = other.pressure(draft, fewer=1)
        if further and other.name != pool.name and lost < pool.pressure(draft):
            found.append((lost, further[-1]))
    return [name for _, name in sorted(found)]


def _further(draft: Draft) -> Iterable[str]:
    return [
        name
        for name, each in draft.statuses.items()
        if each.replica_of and each.state in SERVING and name not in draft.settled
    ]
