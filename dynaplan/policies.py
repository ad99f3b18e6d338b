"""The vocabulary of a policy's author: ``decide(settings, state, observation) -> (state, decision)``.

``policy: my_package.module:decide`` has the planner decide by that function (``planner/own_policy.py``).
"""

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import PoolSizes
from dynaplan.planner.model import Decision, DecisionStep, Observation, PlannerState
from dynaplan.planner.rules.decision import OwnPolicy, current_targets

__all__ = [
    "Decision",
    "DecisionStep",
    "Observation",
    "OwnPolicy",
    "PlannerSettings",
    "PlannerState",
    "PoolSizes",
    "current_targets",
]
