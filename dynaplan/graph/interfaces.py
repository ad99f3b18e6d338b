"""Interfaces between stock services that may not import each other."""

from __future__ import annotations

from dynaplan.graph.dependency import AbstractService


class PlannerInterface(AbstractService):
    """The Frontend's dependency for a linked planner. It has no endpoints: nothing calls a planner."""
