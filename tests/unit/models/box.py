"""A box of models for the tests of the rules: sizes in GB, moments in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaplan.models.model import (
    Action,
    Constraints,
    Device,
    ModelPolicies,
    ModelPolicy,
    ModelsObservation,
    ModelState,
    ModelStatus,
    Plan,
)
from dynaplan.models.rules.planning import plan

GIB = 2**30
NOW_S = 1000.0


def gpus(*total_gb: float, foreign: Sequence[float] = ()) -> tuple[Device, ...]:
    taken = [*foreign, *[0.0] * len(total_gb)]
    return tuple(
        Device(index, int(total * GIB), int(taken[index] * GIB)) for index, total in enumerate(total_gb)
    )


def model(gb: float, **changes: Any) -> ModelPolicy:
    """A model whose owner claims so many GB on each device; a load takes 10 s."""
    return ModelPolicy(claim_bytes=int(gb * GIB), **{"estimate_load_s": 10.0, **changes})


def ready(name: str, on: int | tuple[int, ...] = 0, **changes: Any) -> ModelStatus:
    """A model that became ready 500 s ago and has had nothing to do for 100 s."""
    devices = (on,) if isinstance(on, int) else on
    usual = {"since_s": NOW_S - 500, "last_use_s": NOW_S - 100, "placed_on": devices}
    return ModelStatus(name, ModelState.READY, **{**usual, **changes})


def in_state(name: str, state: ModelState, **changes: Any) -> ModelStatus:
    return ModelStatus(name, state, **{"since_s": NOW_S - 1, "placed_on": (0,), **changes})


def wanted(name: str, for_s: float = 0.0, requests: int = 1, **changes: Any) -> ModelStatus:
    """An unloaded model for which somebody has waited for so long."""
    return ModelStatus(name, waiting=requests, oldest_arrival_s=NOW_S - for_s, **changes)


class Box:
    """Models by name with their settings, on devices."""

    def __init__(self, devices: tuple[Device, ...], constraints: Constraints | None = None, **models: Any):
        self.devices = devices
        self.settings = ModelPolicies(models, constraints or Constraints())

    def plan(self, *statuses: ModelStatus, now_s: float = NOW_S) -> Plan:
        return plan(ModelsObservation(statuses, self.devices), self.settings, now_s)

    def actions(self, *statuses: ModelStatus, now_s: float = NOW_S) -> list[Action]:
        return list(self.plan(*statuses, now_s=now_s).actions)


def said(actions: Sequence[Action]) -> list[str]:
    """Each action as ``Load a``, the reasons left out."""
    return [f"{type(each).__name__} {each.model}" for each in actions]
