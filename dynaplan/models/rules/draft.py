"""A plan in the making: what was decided so far, over two pictures of the memory.

The *present* has what each model holds now, and what was promised to the ones that this plan loads. The
*future* has what will be when all that was decided has come about: drained models gone or asleep, and a place
held for each demand that was gone through. A model may be loaded where there is room in both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import inf

from dynaplan.models.model import (
    Action,
    Load,
    ModelPolicies,
    ModelPolicy,
    ModelsObservation,
    ModelState,
    ModelStatus,
    Plan,
    PlanStep,
    Refuse,
    Sleep,
    Unload,
    Wake,
)
from dynaplan.models.rules.memory import Need, chosen_place, holding, holding_after_drain, need, promise

SHRINK_AFTER_S = 60.0
"""A further worker that requests have not wanted for so long leaves."""

DEFAULTS = ModelPolicy()
"""The settings of a model that has left the configuration and is still loaded."""


class Draft:
    """One call of ``plan``: what is known, and the actions decided so far.

    ``settled`` are the models about which nothing more is decided in it, ``started`` those that it loads.
    """

    def __init__(self, observation: ModelsObservation, settings: ModelPolicies, now_s: float) -> None:
        self.devices, self.constraints, self.now_s = observation.devices, settings.constraints, now_s
        self._settings, self._actions, self._trail = settings.models, list[Action](), list[PlanStep]()
        self._next_at_s = inf
        observed = {each.name: each for each in observation.models}
        self.statuses = {name: observed.get(name, ModelStatus(name)) for name in settings.models}
        self.statuses |= {name: each for name, each in observed.items() if each.is_loaded or each.replica_of}
        self.needs = {
            name: need(self.settings(name), status, observation.devices)
            for name, status in self.statuses.items()
        }
        self.present = {
            name: holding(self.settings(name), status, self.needs[name])
            for name, status in self.statuses.items()
            if status.is_loaded
        }
        self.future = dict(self.present)
        self.settled: set[str] = set()
        self.started: set[str] = set()
        for name, status in self.statuses.items():
            if status.state is ModelState.DRAINING:
                self._expect_drained(name, status.sleep_level)

    def settings(self, name: str) -> ModelPolicy:
        """Return the policy of a worker's model, or the defaults for an unknown one.

        A further worker is put away sooner, never sleeps, and is not pinned.
        """
        own = self._settings.get(self.model_of(name), DEFAULTS)
        if self.model_of(name) == name:
            return own
        ttl_s = min(own.ttl_s or inf, SHRINK_AFTER_S)
        pool = own.prefill if own.prefill and self.statuses[name].is_prefill else own
        return replace(pool, is_pinned=False, priority=own.priority, ttl_s=ttl_s, sleep_levels=())

    def is_configured(self, name: str) -> bool:
        return self.model_of(name) in self._settings

    def model_of(self, name: str) -> str:
        """Return the model that a worker serves: the first worker has its name, a further one another."""
        status = self.statuses.get(name)
        return (status.replica_of if status else "") or name

    @property
    def drainers(self) -> list[str]:
        """The models that hold memory now and are about to release it."""
        return sorted(name for name in self.present if self.future.get(name) != self.present[name])

    def plan(self) -> Plan:
        return Plan(tuple(self._actions), tuple(self._trail), self._next_at_s)

    def add(self, status: ModelStatus) -> None:
        """Take up the status of a further worker that does not exist yet."""
        self.statuses[status.name] = status
        self.needs[status.name] = need(self.settings(status.name), status, self.devices)

    # what may be decided about a model

    def start(self, wanted: Need, devices: Collection[int], why: str) -> None:
        """Load the model on these devices, or wake it there."""
        name = wanted.model
        why += chosen_place(wanted, devices)
        self.started.add(name)
        self.present = {**self.present, name: promise(wanted, devices)}
        self.hold(wanted, devices)
        if self.statuses[name].state is ModelState.ASLEEP:
            self._actions.append(Wake(name, why))
        else:
            self._actions.append(Load(name, tuple(devices), wanted.bytes_each, why))
        self.say(name, "load", why)

    def hold(self, wanted: Need, devices: Collection[int]) -> None:
        """Set the model's memory on these devices aside for later; it is settled."""
        self.future = {**self.future, wanted.model: promise(wanted, devices)}
        self.settled.add(wanted.model)

    def unload(self, name: str, stage: str, why: str) -> None:
        self._actions.append(Unload(name, why))
        self._expect_drained(name)
        self.say(name, stage, why)

    def sleep(self, name: str, stage: str, level: str, why: str) -> None:
        self._actions.append(Sleep(name, level, why))
        self._expect_drained(name, level)
        self.say(name, stage, f"{why}; sleeps (level {level})")

    def refuse(
        self, name: str, http_status: int, why: str, retry_after_s: float = 0.0, until_s: float = inf
    ) -> None:
        """Refuse the requests that wait for the model and came at ``until_s`` or before, if there are any."""
        self.settled.add(name)
        self.say(name, "refuse", why)
        status = self.statuses[name]
        if status.waiting or status.load_asked_s is not None:
            self._actions.append(Refuse(name, http_status, why, retry_after_s, until_s))

    def say(self, name: str, stage: str, why: str) -> None:
        self._trail.append(PlanStep(name, stage, why))

    def plan_again_at(self, at_s: float) -> None:
        if at_s > self.now_s:
            self._next_at_s = min(self._next_at_s, at_s)

    def _expect_drained(self, name: str, sleep_level: str = "") -> None:
        self.settled.add(name)
        after = holding_after_drain(self.settings(name), self.statuses[name], sleep_level)
        self.future = {each: held for each, held in self.future.items() if each != name}
        if after.bytes:
            self.future[name] = after
