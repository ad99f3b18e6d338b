"""The objects that hold keys: in Dynamo's form, fit for their schemas, and read whatever is in them."""

from __future__ import annotations

import json

import pytest
from lightkube.models.discovery_v1 import EndpointSlice

from dynaplan.graph.lifecycle import Role
from dynaplan.store.dynamo_keys import dynamo_keys
from dynaplan.store.instances import Instance
from dynaplan.store.kubernetes_kv.documents import (
    HeldLease,
    PodIdentity,
    PodRecord,
    StoredKey,
    pod_record,
    ready_pods,
    shared_keys,
    shared_map,
    worker_metadata,
)
from tests.unit.store.kubernetes_kv.cluster import endpoint, slice_of

POD = PodIdentity("worker-0", "1-2-3")
INSTANCE = Instance("llm", "VllmWorker", "generate", 42, "http://10.0.0.7:8001", card={"model": "tiny"})


def stored(keys: dict[str, str]) -> dict[str, StoredKey]:
    return {key: StoredKey(value, 7, 42) for key, value in keys.items()}


def record(keys: dict[str, str]) -> PodRecord:
    return PodRecord({42: HeldLease(10, stored(keys))}, "process")


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
