"""Workers that no ``serve`` has started, and those that sleep, as the published fleet counts them."""

from __future__ import annotations

from dataclasses import replace

from dynaplan.fleet.rules.observing import fleet_document, unmanaged
from dynaplan.store.instances import Instance
from tests.unit.fleet.rules.graphs import DRAINING, decode, graph, prefill, worker


def instance(name: str, component: str, number: int, *, is_managed: bool = False) -> Instance:
    url = f"http://127.0.0.1:{number}"
    return Instance("ns", component, "generate", number, url, worker=name, is_managed=is_managed)


def test_unmanaged_workers_are_counted_apart_from_the_fleets_own() -> None:
    instances = [
        instance("ns_VllmWorker", "VllmWorker", 1, is_managed=True),
        instance("ns_VllmWorker_gpu1_8", "VllmWorker", 3),
        instance("ns_VllmWorker_gpu1_7", "VllmWorker", 2),
        instance("ns_VllmWorker_gpu1_7", "VllmWorker", 2),
        instance("ns_Frontend_gpu1_9", "Frontend", 4),
    ]
    own = worker("VllmWorker")
    document = fleet_document(graph(prefill(), decode()), {own.name: own}, 8, instances)
    assert document["unmanaged"] == {"prefill": 0, "decode": 2}
    assert sum(document["roles"]["decode"].values()) == 1
    assert [each.worker for each in unmanaged(instances)] == [
        "ns_Frontend_gpu1_9",
        "ns_VllmWorker_gpu1_7",
        "ns_VllmWorker_gpu1_8",
    ]


def test_a_ready_worker_that_sleeps_is_counted_as_asleep_only() -> None:
    awake, asleep = (
        replace(worker("VllmWorker"), instance_id=1),
        replace(worker("VllmWorker_1"), instance_id=2),
    )
    leaving = replace(worker("PrefillWorker", DRAINING), instance_id=3)
    workers = {each.name: each for each in (awake, asleep, leaving)}
    roles = fleet_document(graph(prefill(), decode()), workers, 8, asleep={2, 3})["roles"]
    assert roles["decode"] == {
        "starting": 0,
        "ready": 1,
        "draining": 0,
        "backoff": 0,
        "failed": 0,
        "asleep": 1,
    }
    assert (roles["prefill"]["draining"], roles["prefill"]["asleep"]) == (1, 0)
