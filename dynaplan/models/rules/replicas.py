"""Further workers of a model that has one: how many it wants, and whose memory they may take.

How many workers a loaded model wants, up to its ``max_workers``, is what its planner says, where it has one.
Else it wants a further one while its requests are more than ``requests_per_worker`` for each that it has. A
further worker is a ``ModelStatus`` of its own, with ``replica_of``, and holds memory as a model does; it
differs from a model's last worker in what is lost:

1. Models without a worker come first: they are served as if no further worker were wanted, and any further
   worker may leave for them at once. What it answers is finished, and the others of its model go on.
2. A further worker takes free memory. It takes that of another model's further worker only where the
   *pressure* without that one, ``priority x workers wanted / workers left``, stays below its own model's
   pressure now. So the highest pressure falls with each exchange, and none is undone. (By requests, the
   workers wanted are a fraction, ``requests / requests_per_worker``.)
3. It never takes the place of a model's last worker: that has its ``ttl``.
4. One that a planner does not want any more leaves at once, for planners have a memory of their own; one
   that requests have not wanted for ``SHRINK_AFTER_S`` leaves then.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from math import ceil, inf

from dynaplan.models.model import ModelPolicy, ModelState, ModelStatus
from dynaplan.models.rules.draft import Draft
from dynaplan.models.rules.eviction import choose, must_leave
from dynaplan.models.rules.ladder import idle_until_s
from dynaplan.models.rules.memory import Need, has_room
from dynaplan.models.rules.turns import count

SERVING = (ModelState.LOADING, ModelState.READY)
"""The states of a worker that answers, or will."""


def replica_name(model: str, number: int) -> str:
    """Return what the model's worker of that number is called, from 1; the first goes by the model's name."""
    return model if number == 1 else f"{model} (worker {number})"


def wanted_workers(settings: ModelPolicy, requests: int, planned: int | None = None) -> int:
    """Return how many workers a model with one is to have: as ``planned``, else by its requests.

    Those are answered or waiting.
    """
    wanted = ceil(requests / settings.requests_per_worker) if planned is None else planned
    return min(settings.max_workers, max(1, wanted))


def as_replica(status: ModelStatus, name: str, model: ModelStatus, is_wanted: bool) -> ModelStatus:
    """Return a worker of the model as a further one; owner and requests ask for the model, not for it."""
    return replace(
        status,
        name=name,
        replica_of=model.name,
        in_flight=min(1, model.in_flight) if is_wanted else 0,
        waiting=0,
        oldest_arrival_s=inf,
        waiting_since_s=inf,
        load_asked_s=None,
        keep_until_s=0.0,
        keep_alive_s=None,
    )


def add_replicas(draft: Draft) -> None:
    """Start one further worker of each model that wants one and for which there is room, or make it.

    What planners do not want any more leaves before.
    """
    models = [status for status in draft.statuses.values() if not status.replica_of]
    for model in models:
        if model.planned_workers is not None:
            _remove_unplanned(draft, model)
    for model in sorted(models, key=lambda each: (-_pressure(draft, each), each.name)):
        is_there = model.state is ModelState.READY and model.name in draft.future
        is_over = idle_until_s(draft.settings(model.name), model) <= draft.now_s
        if is_there and not is_over and len(_serving(draft, model.name)) < _wanted(draft, model):
            _add(draft, model)


def _wanted(draft: Draft, model: ModelStatus) -> int:
    requests = model.in_flight + model.waiting
    return wanted_workers(draft.settings(model.name), requests, model.planned_workers)


def _remove_unplanned(draft: Draft, model: ModelStatus) -> None:
    """Have the further workers leave that are more than the planner wants, the last first."""
    wanted, serving = _wanted(draft, model), _serving(draft, model.name)
    further = [name for name in serving if name != model.name and name not in draft.settled]
    for name in further[::-1][: max(0, len(serving) - wanted)]:
        draft.unload(name, "replica", f"its planner wants {_workers(wanted)}")


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def _serving(draft: Draft, model: str) -> list[str]:
    """Return the model's workers that stay."""
    return [
        name
        for name, each in draft.statuses.items()
        if model in (name, each.replica_of) and each.state in SERVING and name in draft.future
    ]


def _pressure(draft: Draft, model: ModelStatus, fewer: int = 0) -> float:
    """Return the workers that the model wants beside those it has, by priority; ``fewer`` have left."""
    settings, wanted = draft.settings(model.name), float(model.planned_workers or 0)
    if model.planned_workers is None:
        wanted = (model.in_flight + model.waiting) / settings.requests_per_worker
    return settings.priority * wanted / max(1, len(_serving(draft, model.name)) - fewer)


def _add(draft: Draft, model: ModelStatus) -> None:
    name = _next_name(draft, model)
    status = draft.statuses.get(name) or ModelStatus(
        name,
        replica_of=model.name,
        measured_bytes=model.measured_bytes,
        measured_load_s=model.measured_load_s,
        failed_memory_bytes=model.failed_memory_bytes,
    )
    if status.retry_at_s > draft.now_s:
        return
    has = len(_serving(draft, model.name))
    why = f"{count(model.in_flight + model.waiting)} for {_workers(has)}"
    if model.planned_workers is not None:
        why = f"its planner wants {_workers(_wanted(draft, model))}, and it has {has}"
    draft.add(status)
    if _is_kept_apart(draft, model.name):
        draft.say(name, "replica", f"{why}, and what is loaded may not be beside it")
    else:
        _find_room(draft, model, draft.needs[name], why)


def _find_room(draft: Draft, model: ModelStatus, wanted: Need, why: str) -> None:
    """Start the further worker where there is room now and later; else hold room that comes, or make it."""
    rooms = [each for each in draft.devices if has_room(wanted, each, draft.present)]
    choice = choose(wanted, rooms, draft.future, [])
    if choice is not None:
        draft.start(wanted, choice.devices, f"{why}; there is room")
        return
    choice = choose(wanted, draft.devices, draft.future, _displaceable(draft, model))
    if choice is None:
        draft.say(wanted.model, "replica", f"{why}, and there is no room")
        return
    for leaving in choice.leaving:
        other = draft.model_of(leaving)
        draft.unload(leaving, "replica", f"makes room for {wanted.model}: {other} needs it less")
    draft.hold(wanted, choice.devices)
    draft.say(wanted.model, "replica", f"{why}; waits for the memory of {', '.join(draft.drainers)}")


def _next_name(draft: Draft, model: ModelStatus) -> str:
    """Return the name of the further worker that has failed, else one that nobody has."""
    names = (replica_name(model.name, number) for number in itertools.count(2))
    known = draft.statuses
    return next(each for each in names if each not in known or known[each].state is ModelState.FAILED)


def _is_kept_apart(draft: Draft, model: str) -> bool:
    """Tell whether the owner's constraints keep the model from what is loaded, or will be."""
    loaded = {draft.model_of(each) for each in (*draft.present, *draft.future)} - {model}
    return bool(must_leave(draft.constraints, model, sorted(loaded), {}))


def _displaceable(draft: Draft, model: ModelStatus) -> list[str]:
    """Return further workers that are worth less than another one of the model: one of each model at most."""
    found: dict[str, tuple[float, str]] = {}
    for name in _further(draft):
        other = draft.statuses.get(draft.model_of(name))
        if other is None or other.name == model.name:
            continue
        lost = _pressure(draft, other, fewer=1)
        if lost < _pressure(draft, model):
            found[other.name] = (lost, name)
    return [name for _, name in sorted(found.values())]


def _further(draft: Draft) -> Iterable[str]:
    return [
        name
        for name, each in draft.statuses.items()
        if each.replica_of and each.state in SERVING and name not in draft.settled
    ]
