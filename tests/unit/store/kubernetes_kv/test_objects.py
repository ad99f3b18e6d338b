"""Objects as lists and changes tell them: what is older than what is known changes nothing."""

from __future__ import annotations

from dynaplan.store.kubernetes_client import CONFIG_MAPS
from dynaplan.store.kubernetes_kv.objects import ObjectKind
from tests.fakes.kube_api import Object


def kind() -> ObjectKind:
    return ObjectKind((CONFIG_MAPS,), lambda document: document["data"])


def of(name: str, version: int, data: int) -> Object:
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "data": data}


def test_changes_are_taken_over_in_order_and_only_once() -> None:
    found = kind()
    found.replace([of("a", 3, 1)], 5)
    found.apply("MODIFIED", of("a", 4, 0))
    assert found.told == {"a": 1}
    found.apply("MODIFIED", of("a", 6, 2))
    found.apply("ADDED", of("b", 7, 3))
    assert found.told == {"a": 2, "b": 3}
    found.apply("DELETED", of("a", 8, 2))
    found.apply("ADDED", of("a", 6, 2))
    assert found.told == {"b": 3}


def test_a_bookmark_only_tells_the_version() -> None:
    found = kind()
    found.replace([of("a", 3, 1)], 5)
    found.apply("BOOKMARK", {"metadata": {"name": "", "resourceVersion": "9"}})
    assert (found.told, found.version) == ({"a": 1}, 9)


def test_a_list_that_is_older_than_a_change_is_no_news() -> None:
    found = kind()
    found.replace([], 5)
    found.apply("ADDED", of("a", 7, 1))
    found.replace([], 6)
    assert found.told == {"a": 1}
    found.replace([of("b", 8, 2)], 8)
    assert found.told == {"b": 2}
