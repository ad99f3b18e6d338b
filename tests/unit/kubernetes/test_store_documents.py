"""The objects that hold keys: in Dynamo's form, fit for their schemas, and read whatever is in them.

Which keys there are, and who sees them.

Objects as lists and changes tell them: what is older than what is known changes nothing.
"""

from __future__ import annotations

import json

import pytest
from lightkube.models.discovery_v1 import EndpointSlice

from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.client import CONFIG_MAPS
from dynaplan.kubernetes.store_documents import (
    ClusterState,
    ObjectKind,
    PodIdentity,
    PodLease,
    PodRecord,
    StoredKey,
    pod_record,
    ready_pods,
    shared_keys,
    shared_map,
    worker_metadata,
)
from dynaplan.store.instances import Instance, dynamo_keys
from tests.fakes.kube_api import Object
from tests.unit.kubernetes.simulated_cluster import endpoint, slice_of

POD = PodIdentity("worker-0", "1-2-3")
INSTANCE = Instance("llm", "VllmWorker", "generate", 42, "http://10.0.0.7:8001", card={"model": "tiny"})


def stored(keys: dict[str, str]) -> dict[str, StoredKey]:
    return {key: StoredKey(value, 7, 42) for key, value in keys.items()}


def record(keys: dict[str, str]) -> PodRecord:
    return PodRecord({42: PodLease(10, stored(keys))}, "process")


def test_dynamo_reads_instances_and_cards_as_its_own_workers_write_them() -> None:
    """The sections and the names in them are those of ``kube/fixtures/v1_2_dwm.json`` of ai-dynamo/dynamo."""
    keys = dynamo_keys(INSTANCE, Role.DECODE)
    data = worker_metadata("worker-0", record(keys), None, POD)["spec"]["data"]
    assert set(data) == {"endpoints", "model_cards", "event_channels"}
    assert set(data["endpoints"]) == {"llm/VllmWorker/generate/2a", "llm/backend/generate/2a"}
    found = data["endpoints"]["llm/backend/generate/2a"]
    assert (found["type"], found["instance_id"]) == ("Endpoint", 42)
    (card,) = data["model_cards"].values()
    assert (card["type"], card["card_json"]["display_name"]) == ("Model", "tiny")


def test_a_pod_owns_its_object_and_does_not_wait_for_it() -> None:
    metadata = worker_metadata("worker-0", record({}), None, POD)["metadata"]
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Pod", "worker-0", "1-2-3")
    assert owner["blockOwnerDeletion"] is False
    assert metadata["name"] == "worker-0"


def test_what_others_have_written_on_the_object_stays() -> None:
    before = {
        "metadata": {"name": "worker-0", "labels": {"a": "b"}, "annotations": {"c": "d"}, "uid": "u"},
        "spec": {"data": {}},
    }
    written = worker_metadata("worker-0", record({}), before, None)["metadata"]
    assert written["labels"]["a"] == "b"
    assert written["annotations"]["c"] == "d"
    assert "ownerReferences" not in written


def test_what_is_written_is_read_back() -> None:
    keys = {"a/\udcff": "\udc80 ✓", "v1/instances/x": "no JSON"}
    document = worker_metadata("worker-0", record(keys), None, POD)
    assert pod_record(json.loads(json.dumps(document))) == record(keys)
    shared = {"k": StoredKey("v", 3), "lock": StoredKey("", 4, 0x2A)}
    assert shared_keys(shared_map("dynaplan-store", shared, None)) == shared


def test_the_shared_map_keeps_what_else_is_in_it() -> None:
    before = {"metadata": {"name": "dynaplan-store", "resourceVersion": "7"}, "data": {"note": "ours"}}
    written = shared_map("dynaplan-store", {}, before)
    assert written["data"]["note"] == "ours"
    assert written["metadata"]["resourceVersion"] == "7"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"k": 1}', '{"k": {"value": "v"}}', '{"zz": {"ttl_s": 1}}'])
def test_an_object_that_nobody_can_read_holds_nothing(text: str) -> None:
    metadata = {"name": "x", "annotations": {"dynaplan.io/leases": text}}
    assert pod_record({"metadata": metadata}) == PodRecord()
    assert shared_keys({"metadata": {"name": "x"}, "data": {"keys.json": text}}) == {}


def test_ready_pods_are_those_that_are_not_called_unready() -> None:
    assert ready_pods(slice_of(a=True, b=False, c=None)) == {"a", "c"}


def test_endpoints_that_are_no_pods_are_left_out() -> None:
    other = {**endpoint("x", True), "targetRef": {"kind": "Node", "name": "x"}}
    assert ready_pods({"endpoints": [other, {"addresses": ["10.0.0.9"]}]}) == frozenset()
    assert ready_pods({"endpoints": None}) == frozenset()


def test_the_slices_of_these_tests_fit_the_schema_of_v1() -> None:
    document = slice_of(a=True, b=None)
    assert EndpointSlice.from_dict(document).to_dict() == document


def record_of(lease: int, **keys: int) -> PodRecord:
    """A pod's record; each key with its revision."""
    return PodRecord(
        {lease: PodLease(10, {key: StoredKey("", number, lease) for key, number in keys.items()})}
    )


def test_the_keys_of_a_pod_are_seen_by_others_while_it_is_ready_and_by_itself_always() -> None:
    state = ClusterState(pods={"a": record_of(1, k=5)})
    assert set(state.visible_to("b")) == set()
    assert set(state.visible_to("a")) == {"k"}
    assert set(ClusterState(pods=state.pods, ready=frozenset({"a"})).visible_to("b")) == {"k"}
    assert state.unready_pods() == ["a"]
    assert set(state.all_keys()) == {"k"}


def test_a_shared_key_under_a_lease_counts_as_long_as_a_pod_has_the_lease() -> None:
    shared = {"lock": StoredKey("", 3, 1), "free": StoredKey("", 3)}
    assert set(ClusterState(shared, {"a": record_of(1)}).visible_to("b")) == {"lock", "free"}
    assert set(ClusterState(shared).visible_to("b")) == {"free"}


def test_of_a_key_in_two_places_the_newest_counts() -> None:
    shared = {"k": StoredKey("shared", 7)}
    for revision, lease in ((6, 0), (8, 1)):
        state = ClusterState(shared, {"a": record_of(1, k=revision)}, frozenset({"a"}))
        assert state.visible_to("b")["k"].lease == lease


def test_a_lease_has_one_holder_or_none() -> None:
    state = ClusterState(pods={"a": record_of(1)})
    assert state.find_holder(1) == ("a", 10)
    assert state.find_holder(2) is None
    assert state.unready_pods() == []


def kind() -> ObjectKind:
    return ObjectKind((CONFIG_MAPS,), lambda document: document["data"])


def of(name: str, version: int, data: int) -> Object:
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "data": data}


def test_changes_are_taken_over_in_order_and_only_once() -> None:
    found = kind()
    found.replace([of("a", 3, 1)], 5)
    found.apply("MODIFIED", of("a", 4, 0))
    assert found.parsed == {"a": 1}
    found.apply("MODIFIED", of("a", 6, 2))
    found.apply("ADDED", of("b", 7, 3))
    assert found.parsed == {"a": 2, "b": 3}
    found.apply("DELETED", of("a", 8, 2))
    found.apply("ADDED", of("a", 6, 2))
    assert found.parsed == {"b": 3}


def test_a_bookmark_only_tells_the_version() -> None:
    found = kind()
    found.replace([of("a", 3, 1)], 5)
    found.apply("BOOKMARK", {"metadata": {"name": "", "resourceVersion": "9"}})
    assert (found.parsed, found.version) == ({"a": 1}, 9)


def test_a_list_that_is_older_than_a_change_is_no_news() -> None:
    found = kind()
    found.replace([], 5)
    found.apply("ADDED", of("a", 7, 1))
    found.replace([], 6)
    assert found.parsed == {"a": 1}
    found.replace([of("b", 8, 2)], 8)
    assert found.parsed == {"b": 2}
