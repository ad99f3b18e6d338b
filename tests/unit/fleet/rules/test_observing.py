"""Observing: the ends of workers, and workers that no serve has started."""

from __future__ import annotations

from dataclasses import replace

from dynaplan.fleet.rules.observing import Exit, World, fleet_document, observe, unmanaged
from dynaplan.fleet.rules.restarting import after_exit, after_process_ended
from dynaplan.graph.lifecycle import Worker
from dynaplan.store.instances import Instance
from tests.unit.fleet.rules.graphs import BACKOFF, DRAINING, READY, STARTING, decode, graph, prefill, worker

URL = "http://127.0.0.1:7"


def registered(state: object = READY, **more: object) -> Worker:
    own = replace(worker("VllmWorker"), pid=7, started_at=70, instance_id=3, url=URL, since_s=100.0)
    return replace(own, state=state, **more)  # type: ignore[arg-type]


def test_a_worker_without_its_process_is_not_ready_though_it_is_still_registered() -> None:
    own = registered()
    instance = Instance("dynamo", "VllmWorker", "generate", 3, URL, worker=own.name, pid=7)
    world = World(101.0, instances={own.name: instance}, gone=(own.name,))
    seen = observe({own.name: own}, world)
    after = seen.workers[own.name]
    assert (after.state, after.url, after.pid, after.instance_id) == (STARTING, "", 7, 3)
    assert after.reason == "its process has ended"
    assert observe({own.name: after}, world).workers == {own.name: after}
    assert (seen.dead_leases, seen.news, seen.started_s) == ((), (), {})
    gone = observe({own.name: after}, World(102.0, exits={own.name: Exit(-9)}))
    assert (gone.workers[own.name].state, gone.dead_leases) == (BACKOFF, (3,))


def test_a_worker_that_leaves_or_waits_stays_what_it_is_without_its_process() -> None:
    for state in (DRAINING, BACKOFF):
        assert after_process_ended(registered(state), 101.0) == registered(state)
    assert after_process_ended(registered(STARTING), 101.0) == registered(STARTING, url="")


def test_a_stable_worker_begins_anew_whether_its_exit_is_known_at_once_or_later() -> None:
    tried = registered(restarts_s=(1.0, 2.0, 3.0), failures=1)
    for died_s in (110.0, 160.0):
        at_once = after_exit(tried, -9, died_s)
        later = after_exit(after_process_ended(tried, died_s), -9, died_s)
        assert replace(later, history=()) == replace(at_once, history=())


def test_only_of_a_worker_that_had_gpus_they_are_said_to_be_free() -> None:
    for gpus, freed in (((0,), ", its GPUs are free"), ((), "")):
        own = registered(gpus=gpus)
        seen = observe({own.name: own}, World(101.0, exits={own.name: Exit(78)}))
        (line,) = seen.news
        assert line.startswith(f"{own.name} has failed; it is not started again{freed}.\n")


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
