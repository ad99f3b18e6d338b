"""Who is loaded when: the rules of a deployment, and a box on which every model has GPUs of its own.

``dynaplan`` is ``models.rules.planning.plan``, the function that runs in a deployment. Rules of other systems
for the same memory are in ``tests/bench/rivals.py``.
"""

from __future__ import annotations

from itertools import cycle, islice
from math import inf

from dynaplan.models.model import Action, Load, ModelState, Plan, Sleep, Unload, Wake
from dynaplan.models.rules.planning import plan
from dynaplan.simulation.many_models.box import Box


class Dynaplan:
    """The rules of a deployment."""

    name = "dynaplan"

    def act(self, box: Box) -> float:
        box.promote()
        admit_ready(box)
        while (planned := self.plan(box)).actions:
            for action in planned.actions:
                perform(box, action)
            admit_ready(box)
        return planned.next_at_s

    def plan(self, box: Box) -> Plan:
        return plan(box.observation(), box.settings, box.now_s)


def perform(box: Box, action: Action) -> None:
    match action:
        case Load(name, devices):
            box.load(name, devices)
        case Wake(name):
            box.wake(name)
        case Sleep(name, level):
            box.drain(name, level)
        case Unload(name):
            box.drain(name)
        case _:
            box.refuse(action.model, action.status, action.arrived_until_s)


def admit_ready(box: Box) -> None:
    """Give the ready models the requests that wait for them."""
    for name, worker in box.workers.items():
        if worker.status.state is ModelState.READY and worker.waiting:
            box.admit(name)


class OwnGpu:
    """Nothing is shared: what is asked for is loaded once, and stays."""

    name = "own-gpu"

    def act(self, box: Box) -> float:
        admit_ready(box)
        devices = cycle(each.index for each in box.devices)
        for name, worker in box.workers.items():
            own = tuple(islice(devices, worker.model.settings.devices))
            if worker.status.state is ModelState.UNLOADED:
                box.load(name, own)
        return inf
