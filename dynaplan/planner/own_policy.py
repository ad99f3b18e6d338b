"""A policy of the user's own: ``policy: my_package.module:decide``, or ``policy: file.py:decide``.

The function has the form of the planner's own: ``decide(settings, state, observation) -> (state, decision)``.
It is pure: the same three arguments give the same answer, so that what it decided live is replayed
(``dynaplan replay``) and simulated (``dynaplan simulate --policy``) by the same call. ``observation`` has the
numbers of workers, their load, the traffic and its forecast; the decision's steps say why, and stand in
``dynaplan why``. Holds, the GPU budget and the records are the planner's, whatever the function returns.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dynaplan.graph.loading import import_graph_module
from dynaplan.util.errors import ConfigError, nearest

if TYPE_CHECKING:
    from dynaplan.config.settings.planner import PlannerSettings
    from dynaplan.planner.rules.decision import OwnPolicy


def load_own_policy(settings: PlannerSettings) -> OwnPolicy | None:
    """Import the function that ``policy`` names; None where it names one of dynaplan's policies.

    The working directory is searched first. Raises ConfigError for a function that is not there, GraphError,
    with the cause and its line, for a module that cannot be imported.
    """
    if not settings.has_own_policy:
        return None
    module_name, _, name = settings.policy.rpartition(":")
    module = import_graph_module(module_name, Path.cwd())
    function: OwnPolicy | None = getattr(module, name, None)
    if not callable(function):
        functions = [each for each, value in vars(module).items() if callable(value)]
        raise ConfigError(
            f"policy is {settings.policy!r}, but {module_name} has no function {name}",
            hint=f"Expected decide(settings, state, observation) there. {nearest(name, functions)}",
        )
    return function
