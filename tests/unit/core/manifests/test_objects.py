"""Names, labels and namespaces of the objects."""

from __future__ import annotations

import pytest

from dynaplan.core.manifests.objects import config_map, intent_map_name, metadata, selector
from tests.unit.core.manifests.deployments import deployment


def test_an_object_is_in_the_namespace_that_is_named_and_else_in_kubectls() -> None:
    assert "namespace" not in metadata(deployment(), "box-x")
    assert metadata(deployment(namespace="llm"), "box-x")["namespace"] == "llm"


def test_only_what_is_scaled_bears_the_label_of_a_role() -> None:
    roles = [
        metadata(deployment(), "x", part)["labels"].get("dynaplan.io/role") for part in ("decode", "nats")
    ]
    assert roles == ["decode", None]


@pytest.mark.parametrize(("namespace", "label"), [("my_Box.1", "my_Box.1"), ("box-", None)])
def test_the_deployment_is_named_on_what_is_scaled_where_a_label_may_have_that_name(
    namespace: str, label: str | None
) -> None:
    found = metadata(deployment(graph_namespace=namespace), "x", "decode")["labels"]
    assert found.get("dynaplan.io/namespace") == label


@pytest.mark.parametrize(("namespace", "name"), [("My_Box", "dynaplan-my-box"), ("_", "dynaplan-planner")])
def test_a_planners_own_config_map_is_named_by_its_deployment(namespace: str, name: str) -> None:
    assert intent_map_name(namespace) == name


def test_what_selects_pods_does_not_change_with_versions_or_roles() -> None:
    assert selector(deployment(), "decode") == {
        "app.kubernetes.io/instance": "box",
        "app.kubernetes.io/component": "decode",
    }


def test_an_empty_part_of_a_config_map_is_left_out() -> None:
    assert {"data", "binaryData"} & config_map(deployment(), "graph", {"a": "b"}).keys() == {"data"}
    assert {"data", "binaryData"} & config_map(deployment(), "graph", {}, {"a": b"b"}).keys() == {
        "binaryData"
    }
