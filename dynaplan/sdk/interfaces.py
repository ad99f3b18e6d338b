"""Interfaces between stock services that may not import each other."""

from __future__ import annotations

from dynaplan.sdk.dependency import AbstractService


class PlannerInterface(AbstractService):
    """What the Frontend depends on when a graph links a planner to it. It has no endpoints: it only acts."""
