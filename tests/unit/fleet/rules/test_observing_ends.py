"""Workers whose process has ended, and whose exit is still waited for."""

from __future__ import annotations

from dataclasses import replace

from dynaplan.fleet.rules.observing import Exit, World, observe
from dynaplan.fleet.rules.restarting import after_exit, without_process
from dynaplan.graph.lifecycle import Worker
from dynaplan.store.instances import Instance
from tests.unit.fleet.rules.graphs import BACKOFF, DRAINING, READY, STARTING, worker

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
        assert without_process(registered(state), 101.0) == registered(state)
    assert without_process(registered(STARTING), 101.0) == registered(STARTING, url="")


def test_a_stable_worker_begins_anew_whether_its_exit_is_known_at_once_or_later() -> None:
    tried = registered(restarts_s=(1.0, 2.0, 3.0), failures=1)
    for died_s in (110.0, 160.0):
        at_once = after_exit(tried, -9, died_s)
        later = after_exit(without_process(tried, died_s), -9, died_s)
        assert replace(later, history=()) == replace(at_once, history=())
