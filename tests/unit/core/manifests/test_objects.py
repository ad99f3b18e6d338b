"""Names, labels and namespaces of the objects."""

from __future__ import annotations

from dynaplan.core.manifests.objects import config_map, metadata, selector
from tests.unit.core.manifests.deployments import deployment


def test_an_object_is_in_the_namespace_that_is_named_and_else_in_kubectls() -> None:
    assert "namespace" not in metadata(deployment(), "box-x")
    assert metadata(deployment(namespace="llm"), "box-x")["namespace"] == "llm"


def test_only_what_is_scaled_bears_the_label_of_a_role() -> None:
    roles = [
        metadata(deployment(), "x", part)["labels"].get("dynaplan.io/role") for part in ("decode", "nats")
    ]
    assert roles == ["decode", None]


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
