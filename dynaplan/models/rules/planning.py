"""What is to be loaded, put away and refused now: the one function that the owner of loads calls."""

from __future__ import annotations

from dynaplan.models.model import Observation, Outlook, Plan, Settings


def plan(observation: Observation, settings: Settings, now_s: float) -> Plan:
    """Return what is to be done now, with the reason for each model that was considered."""
    raise NotImplementedError


def outlook(observation: Observation, settings: Settings, name: str, now_s: float) -> Outlook:
    """Return what a request for the model of that name would meet if it came now."""
    raise NotImplementedError
