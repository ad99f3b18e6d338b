"""Names of objects in a cluster."""

from __future__ import annotations

import pytest

from dynaplan.kubernetes.names import intent_map_name


@pytest.mark.parametrize(("namespace", "name"), [("My_Box", "dynaplan-my-box"), ("_", "dynaplan-planner")])
def test_a_planners_own_config_map_is_named_by_its_deployment(namespace: str, name: str) -> None:
    assert intent_map_name(namespace) == name
