"""What is to be loaded, put away and refused now: the one function that the owner of loads calls.

``plan`` is level-triggered. It is called whenever anything has changed and at ``next_at_s``, remembers
nothing, and gives only what is not under way yet: a model that loads or drains is seen doing so. It goes
through these stages, by whose names the trail says which one speaks:

1. ``owner``: what the owner asked to unload goes, and what has left the configuration.
2. ``load``: a load past its ``load_timeout_s`` that nobody waits for is stopped. ``sleep``: so is a sleeper
   whose memory did not come back (``ladder``). ``memory``: so is a worker
   that starts where its memory was given to another: a sleeper that died, and is started again as any is.
3. ``refuse``: requests that have waited too long, or that wait for a model which has just failed, are
   refused.
4. ``load``, ``room``, ``turn``: the models in demand (``demand``).
5. ``replica``: prefill workers, and further workers of models that have many requests (``replicas``).
6. ``idle``: what has been idle for too long sleeps or is unloaded (``ladder``).
"""

from __future__ import annotations

from math import inf

from dynaplan.models.model import (
    HOST,
    ModelPolicies,
    ModelsObservation,
    ModelState,
    ModelStatus,
    Plan,
)
from dynaplan.models.rules import ladder
from dynaplan.models.rules.demand import Demands
from dynaplan.models.rules.draft import Draft
from dynaplan.models.rules.eviction import idle_s
from dynaplan.models.rules.memory import load_s
from dynaplan.models.rules.replicas import add_replicas, put_away_prefill_workers
from dynaplan.models.rules.turns import seconds

CAN_LEAVE = (ModelState.LOADING, ModelState.READY, ModelState.ASLEEP)
"""The states in which a model can be told to leave."""


def plan(observation: ModelsObservation, settings: ModelPolicies, now_s: float) -> Plan:
    """Return what is to be done now, with the reason for each model that was considered."""
    draft = Draft(observation, settings, now_s)
    for name, status in draft.statuses.items():
        if status.state in CAN_LEAVE:
            _unload_on_orders(draft, name, status)
        if name not in draft.settled:
            _check_sleeper(draft, name, status)
            _refuse_failed_and_late(draft, name, status)
    _stop_what_does_not_fit(draft)
    Demands(draft).serve()
    add_replicas(draft)
    for name, status in draft.statuses.items():
        if name not in draft.settled:
            _put_away_idle(draft, name, status)
    put_away_prefill_workers(draft)
    return draft.plan()


def _unload_on_orders(draft: Draft, name: str, status: ModelStatus) -> None:
    if not draft.is_configured(name):
        draft.unload(name, "owner", "it is not in the configuration any more")
    elif status.unload_asked:
        draft.unload(name, "owner", "its owner asked to unload it")


def _check_sleeper(draft: Draft, name: str, status: ModelStatus) -> None:
    """Unload a sleeper that kept its memory, or a load that is late and that nobody waits for."""
    if status.state is ModelState.LOADING:
        late_s = status.since_s + draft.settings(name).load_timeout_s
        draft.plan_again_at(late_s)
        if draft.now_s >= late_s and _is_abandoned(draft, status):
            loaded = seconds(draft.now_s - status.since_s)
            why = f"has been loading for {loaded} (load-timeout), and nobody waits for it"
            draft.unload(name, "load", why)
            return
    if failure := ladder.failed_sleep(draft.settings(name), status, draft.now_s):
        draft.unload(name, "sleep", failure)
    elif status.state is ModelState.ASLEEP:
        draft.plan_again_at(status.since_s + ladder.SETTLE_S)


def _is_abandoned(draft: Draft, status: ModelStatus) -> bool:
    """Tell whether nobody waits for the model's load any more; never so for a further worker."""
    is_wanted = status.waiting or status.load_asked_s is not None or draft.settings(status.name).is_pinned
    return not is_wanted and not status.replica_of


def _stop_what_does_not_fit(draft: Draft) -> None:
    """Stop workers that are starting, the last first, while a GPU's memory is given out more than once."""
    starting = [
        (name, each)
        for name, each in draft.statuses.items()
        if each.state is ModelState.LOADING and name not in draft.settled
    ]
    for name, status in sorted(starting, key=lambda each: -each[1].since_s):
        for device in draft.devices:
            given = sum(each.bytes.get(device.index, 0) for each in draft.future.values())
            if device.index in status.placed_on and device.index != HOST and given > device.total_bytes:
                why = f"the memory of GPU {device.index} was given to another while it slept"
                draft.unload(name, "memory", why)
                break


def _refuse_failed_and_late(draft: Draft, name: str, status: ModelStatus) -> None:
    """Refuse requests for a failed model until it is tried again, and those that waited too long for any."""
    if status.state is ModelState.FAILED and draft.now_s < status.retry_at_s:
        draft.plan_again_at(status.retry_at_s)
        wait_s = status.retry_at_s - draft.now_s
        again = f"tried again in {wait_s:.0f} s" if wait_s < inf else "it can never start"
        reason = status.reason or "it could not be loaded"
        draft.refuse(name, 503, f"{reason}; {again}", wait_s if wait_s < inf else 0.0)
        return
    timeout_s = draft.settings(name).load_timeout_s
    if status.waiting and status.oldest_arrival_s + timeout_s <= draft.now_s:
        was_there = status.state is ModelState.READY
        what = "it had no place for them" if was_there else "it was not there"
        why = f"{what} within {timeout_s:.0f} s (load-timeout)"
        why += f": {status.reason}" if status.reason else ""
        draft.refuse(name, 503, why, load_s(draft.settings(name), status), draft.now_s - timeout_s)
    elif status.waiting:
        draft.plan_again_at(status.oldest_arrival_s + timeout_s)


def _put_away_idle(draft: Draft, name: str, status: ModelStatus) -> None:
    settings = draft.settings(name)
    until_s = ladder.idle_until_s(settings, status)
    draft.plan_again_at(until_s)
    if until_s > draft.now_s:
        return
    held = max(draft.present[name].bytes.values(), default=0)
    level = ladder.for_idleness(
        settings, status, held, ladder.host_of(draft.devices), draft.future, draft.now_s
    )
    idle = f"idle for {seconds(idle_s(status, draft.now_s))}"
    if ladder.power_saving_at_s(settings, status) <= draft.now_s:
        why = f"nobody has asked for it for {seconds(settings.power_saving_after_s)} (power-saving-after)"
    elif status.keep_alive_s is None:
        why = f"{idle}, longer than its ttl of {settings.ttl_s:.0f} s"
    else:
        why = f"{idle}; its last request asked for {status.keep_alive_s:g} s (keep_alive)"
    if level and status.keep_alive_s != 0:
        draft.sleep(name, "idle", level.name, why)
    else:
        draft.unload(name, "idle", why)
