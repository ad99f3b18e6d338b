from __future__ import annotations

import json

from dynaplan.fleet.unreadable import prefixes, uncallable, unreadable
from dynaplan.store.instances import Instance, dynamo_keys
from dynaplan.store.model import KeyValue

OURS = Instance("ns", "VllmWorker", "generate", 1, "http://127.0.0.1:1")
DYNAMOS = json.dumps({"type": "Endpoint", "transport": {"tcp": "10.0.0.7:4000/2/ns/backend/generate"}})
FOREIGN_KEY = "v1/instances/ns/backend/generate/2"
SEEDS_KEY = "/services/ns/backend/generate/3"
SEEDS = OURS.to_json().replace('{"http":"http://127.0.0.1:1"}', '{"tcp":"192.168.1.10:9999"}')


def items(keys: dict[str, str]) -> list[KeyValue]:
    return [KeyValue(key, value) for key, value in keys.items()]


def test_instances_that_are_not_reached_over_http_are_named_in_either_layout() -> None:
    ours = {OURS.key: OURS.to_json(), **dynamo_keys(OURS)}
    found = items({**ours, FOREIGN_KEY: DYNAMOS, SEEDS_KEY: SEEDS, "v1/ns/planner/decision_id": "1"})
    assert uncallable(found) == {
        FOREIGN_KEY: "tcp 10.0.0.7:4000/2/ns/backend/generate",
        SEEDS_KEY: "tcp 192.168.1.10:9999",
    }
    assert unreadable("ns", found) == {}
    assert all(each.key.startswith(prefixes("ns")) for each in found)


def test_what_is_no_instance_is_unreadable_and_not_uncallable() -> None:
    found = items({FOREIGN_KEY: "[]", SEEDS_KEY: "{}"})
    assert uncallable(found) == {}
    assert unreadable("ns", found).keys() == {FOREIGN_KEY, SEEDS_KEY}
