"""Models that are loaded on request, pass by pass: by demand, in each other's place, and after a restart."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from dynaplan.contract.gpus import Gpu, GpuUse
from dynaplan.contract.model_keys import ModelDemand, ModelOrders
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.engines.llamacpp.saved_slots import SavedSlot, saved_in
from dynaplan.fleet.plugin import model_manager
from dynaplan.fleet.plugin.gpu_availability import GpuMemory
from dynaplan.graph.lifecycle import Role, WorkerState
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.models.model import Learnt
from dynaplan.models.rules.draft import SHRINK_AFTER_S
from dynaplan.models.step import PLANNER_GRACE_S
from dynaplan.process.memory import BoxMemory
from tests.unit.fleet.plugin.box import Box

GIB = 2**30
MODELS = {name: {"engine": "sim", "memory": "50GiB", "max-swap-wait": 5} for name in ("ant", "bee")}
GRAPH = GraphSpec(
    "dynaplan.components:Frontend",
    "/srv/project",
    "ns",
    (
        ServiceSpec("Frontend", Role.FRONTEND),
        *(ServiceSpec(name, Role.DECODE, gpus=1, model=name, shares_memory=True) for name in MODELS),
    ),
)


def models_box(directory: Path) -> Box:
    """One GPU of 80 GiB, and two models of 50 GiB each."""
    box = Box(directory)
    sections = {name: {"engine": "sim", "model": name} for name in MODELS}
    box.launch = replace(
        box.launch,
        graph=GRAPH,
        gpus=(Gpu(0, "GPU-SIM-0", memory_bytes=80 * GIB),),
        config={**sections, "Models": MODELS},
    )
    box.link.counts = DesiredCounts()
    box.new_reconciler()
    return box


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return models_box(tmp_path)


def waiting(box: Box, name: str, number: int = 1) -> None:
    """That many requests for the model have just come, and no others."""
    box.link.model_demand = {name: ModelDemand(number, box.reconciler._ports.wall_clock(), 0, 0.0)}


async def asked(box: Box, name: str) -> None:
    """A request for the model has just come, and all that follows at once has happened."""
    waiting(box, name)
    await box.settle()


async def test_a_model_is_loaded_once_for_any_number_of_callers(box: Box) -> None:
    await box.settle()
    assert box.states() == {"ns_Frontend": "ready"}
    waiting(box, "ant", 50)
    await box.reconciler.reconcile_once()
    assert box.states()["ns_ant"] == "starting"
    waiting(box, "ant", 70)
    await box.settle()
    assert [name for name in box.circus.pids if "ant" in name] == ["ns_ant"]
    assert box.states()["ns_ant"] == "ready"
    ant = box.reconciler.workers["ns_ant"]
    assert (ant.gpus, ant.memory_bytes) == ((0,), 50 * GIB)
    assert box.link.fleet["models"]["ant"]["state"] == "ready"
    assert box.statefile.learnt["ant"].ready_unix_s > 0


async def test_a_model_makes_room_when_it_has_nothing_to_do_and_the_next_starts_when_it_is_gone(
    box: Box,
) -> None:
    await asked(box, "ant")
    await asked(box, "bee")
    assert box.states()["ns_ant"] == "draining"
    assert "ns_bee" not in box.states()
    assert "makes room for bee" in box.reconciler.workers["ns_ant"].reason
    box.reconciler.record_exit(box.circus.end("ns_ant"), 0)
    await box.settle()
    assert (box.states().get("ns_ant"), box.states()["ns_bee"]) == (None, "ready")


async def test_a_model_that_answers_goes_on_until_the_others_turn_has_come(box: Box) -> None:
    await asked(box, "ant")
    wall_s = box.reconciler._ports.wall_clock()
    box.link.model_demand = {"ant": ModelDemand(0, 0.0, 1, wall_s), "bee": ModelDemand(1, wall_s, 0, 0.0)}
    await box.settle()
    assert box.states()["ns_ant"] == "ready"
    box.link.model_demand["bee"] = ModelDemand(1, wall_s - 6, 0, 0.0)
    await box.settle()
    assert box.states()["ns_ant"] == "draining"


async def test_while_the_store_says_nothing_every_model_stays_as_it_is(box: Box) -> None:
    await asked(box, "ant")
    box.link.model_demand = None
    box.now += 10_000
    await box.settle()
    assert box.states()["ns_ant"] == "ready"


async def test_a_reconciler_that_starts_anew_goes_on_with_a_load_and_does_not_begin_another(box: Box) -> None:
    waiting(box, "ant")
    await box.reconciler.reconcile_once()
    pids = dict(box.circus.pids)
    box.new_reconciler()
    await box.settle()
    assert box.circus.pids == pids
    assert box.states()["ns_ant"] == "ready"


async def test_a_person_loads_pins_and_puts_away(box: Box) -> None:
    wall_s = box.reconciler._ports.wall_clock()
    box.link.model_orders = ModelOrders({}).changed("ant", is_pinned=True).to_text()
    await box.settle()
    assert box.states()["ns_ant"] == "ready"
    await asked(box, "bee")
    refusal = box.link.fleet["models"]["bee"]["refusal"]
    assert (refusal["status"], "beside ant: pinned" in refusal["why"]) == (409, True)
    orders = ModelOrders({}).changed("ant", unload_unix_s=wall_s + 60, is_pinned=False)
    box.link.model_orders = orders.to_text()
    await box.settle()
    assert box.states()["ns_ant"] == "draining"


async def test_what_persons_asked_is_remembered_while_the_store_is_away(box: Box) -> None:
    box.link.model_orders = None
    box.statefile.planner_keys["models"] = ModelOrders({}).changed("bee", is_pinned=True).to_text()
    await box.settle()
    assert box.states()["ns_bee"] == "ready"


async def test_a_model_that_can_never_start_is_told_to_those_who_wait_for_it(box: Box) -> None:
    waiting(box, "ant")
    await box.reconciler.reconcile_once()
    box.reconciler.record_exit(box.circus.end("ns_ant"), 78)
    await box.settle()
    assert box.reconciler.workers["ns_ant"].state is WorkerState.FAILED
    assert box.link.fleet["models"]["ant"]["refusal"]["status"] == 503
    assert box.link.fleet["absent"]["ant"]


async def test_a_load_that_failed_for_want_of_memory_is_not_tried_again_with_as_little(
    box: Box, tmp_path: Path
) -> None:
    waiting(box, "ant")
    await box.reconciler.reconcile_once()
    (tmp_path / "ns_ant.log").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    )
    given = []
    for _ in range(3):
        box.reconciler.record_exit(box.circus.end("ns_ant"), 1)
        await box.reconciler.reconcile_once()
        await box.reconciler.reconcile_once()
        given.append(box.reconciler.workers["ns_ant"].memory_bytes / GIB)
    assert given == [62.5, 78.125, 80], "all of it, before it is given up"
    box.reconciler.record_exit(box.circus.end("ns_ant"), 1)
    await box.settle()
    assert box.reconciler.workers["ns_ant"].state is WorkerState.FAILED
    assert "it needs 100.0 GiB" in box.link.fleet["models"]["ant"]["refusal"]["why"]
    box.link.model_demand = {}
    assert await box.reconciler.reconcile_once() > 0.1, "nobody waits for it: no spinning"


def test_what_was_learnt_is_where_a_manager_begins(box: Box) -> None:
    learnt = {"ant": Learnt(memory_bytes=7)}
    box.statefile.learnt = learnt
    box.new_reconciler()
    assert box.reconciler._models.state.learnt == learnt


async def test_a_load_that_the_full_disk_holds_up_says_so_and_is_not_waited_for_long(box: Box) -> None:
    await box.settle()
    box.statefile.is_disk_full = True
    waiting(box, "ant")
    await box.reconciler.reconcile_once()
    asked_s = box.reconciler._ports.wall_clock()
    box.now += 20
    for _ in range(3):
        await box.reconciler.reconcile_once()
    report = box.link.fleet["models"]["ant"]
    assert "ns_ant" not in box.states()
    assert "no space left on device" in report["why"]
    assert report["refusal"]["status"] == 503
    assert report["refusal"]["until_unix_s"] == pytest.approx(asked_s - 10, abs=5)
    events = [each.sentence for each in box.reconciler.model_events]
    assert sum("no space left" in each for each in events) == 1
    box.statefile.is_disk_full = False
    await box.settle()
    assert box.states()["ns_ant"] == "ready"
    assert [each.sentence[:5] for each in box.reconciler.model_events][-1] == "load:"


async def test_a_demand_goes_on_when_its_first_client_gives_up_and_another_asks(box: Box) -> None:
    await asked(box, "ant")
    for _ in range(3):
        wall_s = box.reconciler._ports.wall_clock()
        box.link.model_demand = {"ant": ModelDemand(0, 0.0, 1, wall_s), "bee": ModelDemand(1, wall_s)}
        await box.settle()
        box.link.model_demand["bee"] = ModelDemand()
        await box.settle()
        box.now += 3
    box.link.model_demand["bee"] = ModelDemand(1, box.reconciler._ports.wall_clock())
    await box.settle()
    assert box.states()["ns_ant"] == "draining", "bee has been wanted for longer than max-swap-wait"


async def test_a_model_that_is_preloaded_gets_its_turn_from_one_that_answers(box: Box) -> None:
    await asked(box, "ant")
    box.link.model_demand = {"ant": ModelDemand(0, 0.0, 1, box.reconciler._ports.wall_clock())}
    models = {**MODELS, "bee": {**MODELS["bee"], "preload": True}}
    box.launch = replace(box.launch, config={**box.launch.config, "Models": models})
    box.new_reconciler()
    await box.settle()
    assert box.states()["ns_ant"] == "ready"
    box.now += 6
    await box.settle()
    assert box.states()["ns_ant"] == "draining"


async def test_while_the_demand_is_unknown_nothing_is_refused_and_no_plan_is_due(box: Box) -> None:
    box.link.model_orders = ModelOrders({}).changed("ant", is_pinned=True).to_text()
    await box.settle()
    await asked(box, "bee")
    assert "refusal" in box.link.fleet["models"]["bee"]
    box.link.model_demand = None
    await box.settle()
    assert "refusal" not in box.link.fleet["models"]["bee"]
    assert box.reconciler._models.next_at_s == inf


async def test_a_failed_model_is_one_event_while_its_next_attempt_comes_nearer(box: Box) -> None:
    for _ in range(20):
        waiting(box, "ant")
        await box.settle(1)
        if "ns_ant" in box.circus.pids:
            box.reconciler.record_exit(box.circus.end("ns_ant"), 1)
        box.now += 1
    sentences = [each["sentence"] for each in box.link.fleet["model_events"]]
    assert sum("tried again" in each for each in sentences) == 1, sentences


async def test_saved_kv_entries_keep_no_model_from_the_hosts_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_manager, "is_in_memory", lambda directory: True)
    box = models_box(tmp_path)
    box.host = BoxMemory(16 * GIB, 3 * GIB)
    on_host = ServiceSpec("ant", Role.DECODE, gpus=0, model="ant", shares_memory=True)
    config = {**box.launch.config, "Models": {"ant": {**MODELS["ant"], "memory": "4GiB"}}}
    graph = replace(GRAPH, services=(GRAPH.services[0], on_host))
    box.launch = replace(box.launch, gpus=(), graph=graph, config=config)
    box.launch.scratch_dir.mkdir()
    for age in range(3):
        (box.launch.scratch_dir / SavedSlot(age, "0" * 16, 100, GIB, "bee").file_name).touch()
    box.new_reconciler()
    waiting(box, "ant")
    await box.reconciler.reconcile_once()
    assert box.states()["ns_ant"] == "starting"
    assert len(saved_in(box.launch.scratch_dir)) == 2


async def idle_sleeper(box: Box) -> int:
    """A model that may sleep, idle for longer than its ttl; its instance."""
    sections = {name: {"engine": "sim", "model": name, "enable-sleep-mode": True} for name in MODELS}
    models = {name: {**each, "ttl": 60} for name, each in MODELS.items()}
    box.launch = replace(box.launch, config={**sections, "Models": models})
    box.new_reconciler()
    await asked(box, "ant")
    box.link.model_demand = {}
    box.now += 100
    await box.settle()
    return box.reconciler.workers["ns_ant"].instance_id


def state_of(box: Box, name: str) -> str:
    return str(box.link.fleet["models"][name]["state"])


async def test_an_idle_model_is_put_to_sleep_and_woken_by_a_request(box: Box) -> None:
    ant = await idle_sleeper(box)
    assert box.link.sleep_orders == {ant: "1"}
    await box.settle()
    assert (state_of(box, "ant"), box.states()["ns_ant"]) == ("draining", "ready")
    box.link.sleep_reasons = {ant: ""}
    await box.settle()
    assert state_of(box, "ant") == "asleep"
    assert box.link.fleet["models"]["ant"]["memory_bytes"] == 1_100_000_000
    await asked(box, "ant")
    assert (box.link.woken, state_of(box, "ant")) == ([ant], "loading")
    box.link.sleep_reasons = {}
    await box.settle()
    assert state_of(box, "ant") == "ready"
    report = box.link.fleet["models"]["ant"]
    assert report["since_unix_s"] == pytest.approx(box.reconciler._ports.wall_clock(), abs=5), "since it woke"


async def test_a_sleep_after_which_the_driver_sees_no_memory_come_back_is_stopped(box: Box) -> None:
    used = {0: GpuUse(0)}
    box.memory = GpuMemory(box.launch.gpus, lambda: dict(used), box, box.wake)
    await box.memory.read_once()
    ant = await idle_sleeper(box)
    used[0] = GpuUse(50 * GIB)
    await box.memory.read_once()
    await box.settle()
    box.link.sleep_reasons = {ant: ""}
    await box.settle()
    assert state_of(box, "ant") == "asleep"
    box.now += 11
    await box.memory.read_once()
    await box.settle()
    assert box.states()["ns_ant"] == "draining"
    why = box.reconciler.workers["ns_ant"].reason
    assert "it still holds 50.0 GiB of GPU 0, where 1.0 GiB are usual; it is stopped instead" in why


async def test_a_sleeper_that_dies_while_another_has_its_memory_is_not_started_again(box: Box) -> None:
    ant = await idle_sleeper(box)
    box.link.sleep_reasons = {ant: ""}
    await asked(box, "bee")
    assert (state_of(box, "ant"), state_of(box, "bee")) == ("asleep", "ready")
    box.link.sleep_reasons, box.link.sleep_orders = {}, {}
    box.reconciler.record_exit(box.circus.end("ns_ant"), -9)
    for _ in range(4):
        await box.settle()
        assert box.states().get("ns_ant", "stopped") in ("draining", "stopped", "backoff")
    assert (state_of(box, "ant"), state_of(box, "bee")) == ("unloaded", "ready")


async def test_another_model_is_loaded_beside_a_sleeper(box: Box) -> None:
    ant = await idle_sleeper(box)
    box.link.sleep_reasons = {ant: ""}
    await asked(box, "bee")
    assert (state_of(box, "ant"), state_of(box, "bee")) == ("asleep", "ready")
    box.link.model_demand = {"ant": ModelDemand(1, box.reconciler._ports.wall_clock(), 0, 0.0)}
    await box.settle()
    assert state_of(box, "bee") == "draining", "the sleeper wakes where it is"
    assert box.link.woken == []


@pytest.mark.parametrize(("order", "why"), [("failed: no room", ""), ("1", "no room")])
async def test_a_model_that_cannot_sleep_or_wake_is_stopped_and_unloaded_the_next_time(
    box: Box, order: str, why: str
) -> None:
    ant = await idle_sleeper(box)
    box.link.sleep_orders = {ant: order}
    box.link.sleep_reasons = dict.fromkeys([ant], why) if why else {}
    await box.settle()
    assert box.states()["ns_ant"] == "draining"
    assert "no room; it is stopped instead" in box.reconciler.workers["ns_ant"].reason
    box.link.sleep_orders, box.link.sleep_reasons = {}, {}
    box.reconciler.record_exit(box.circus.end("ns_ant"), 0)
    await asked(box, "ant")
    box.link.model_demand = {}
    box.now += 100
    await box.settle()
    assert (box.link.sleep_orders, box.states()["ns_ant"]) == ({}, "draining")


def growing_box(directory: Path) -> Box:
    """Two GPUs; ant may have two workers, one for each two requests."""
    box = models_box(directory)
    models = {**MODELS, "ant": {**MODELS["ant"], "max-workers": 2, "requests-per-worker": 2}}
    gpus = tuple(Gpu(index, f"GPU-SIM-{index}", memory_bytes=80 * GIB) for index in range(2))
    box.launch = replace(box.launch, gpus=gpus, config={**box.launch.config, "Models": models})
    box.new_reconciler()
    return box


def answering(box: Box, **in_flight: int) -> None:
    """So many requests are being answered by each of these models."""
    wall_s = box.reconciler._ports.wall_clock()
    box.link.model_demand = {name: ModelDemand(0, 0.0, each, wall_s) for name, each in in_flight.items()}


async def grown(directory: Path) -> Box:
    box = growing_box(directory)
    await asked(box, "ant")
    answering(box, ant=5)
    await box.settle()
    assert (box.states()["ns_ant"], box.states()["ns_ant_1"]) == ("ready", "ready")
    assert box.link.fleet["models"]["ant"]["gpus"] == (0, 1)
    return box


async def test_a_model_with_many_requests_gets_a_second_worker_that_leaves_when_they_are_fewer(
    tmp_path: Path,
) -> None:
    box = await grown(tmp_path)
    answering(box, ant=1)
    await box.settle()
    assert box.states()["ns_ant_1"] == "ready", "not at the first pause"
    box.now += SHRINK_AFTER_S
    await box.settle()
    assert (box.states()["ns_ant"], box.states()["ns_ant_1"]) == ("ready", "draining")


async def test_the_second_worker_makes_room_for_another_model_and_the_first_goes_on(tmp_path: Path) -> None:
    box = await grown(tmp_path)
    answering(box, ant=5)
    box.link.model_demand["bee"] = ModelDemand(1, box.reconciler._ports.wall_clock(), 0, 0.0)
    await box.settle()
    assert (box.states()["ns_ant"], box.states()["ns_ant_1"]) == ("ready", "draining")
    assert "ns_bee" not in box.states()
    box.reconciler.record_exit(box.circus.end("ns_ant_1"), 0)
    await box.settle()
    assert (box.states()["ns_ant"], box.states()["ns_bee"]) == ("ready", "ready")
    assert box.link.fleet["models"]["ant"]["state"] == "ready"


async def test_a_model_whose_first_worker_dies_stays_ready_by_its_second(tmp_path: Path) -> None:
    box = await grown(tmp_path)
    box.reconciler.record_exit(box.circus.end("ns_ant"), 1)
    box.register()
    await box.reconciler.reconcile_once()
    assert box.states()["ns_ant"] == "starting"
    assert box.link.fleet["models"]["ant"]["state"] == "ready"


async def test_who_is_put_away_by_a_person_leaves_with_all_workers(tmp_path: Path) -> None:
    box = await grown(tmp_path)
    orders = ModelOrders({}).changed("ant", unload_unix_s=box.reconciler._ports.wall_clock() + 60)
    box.link.model_orders = orders.to_text()
    await box.settle()
    assert (box.states()["ns_ant"], box.states()["ns_ant_1"]) == ("draining", "draining")


def planned_box(directory: Path) -> Box:
    """Two GPUs; ant has a planner of its own, whose process is there."""
    box = growing_box(directory)
    models = {**box.launch.config["Models"], "ant": {**MODELS["ant"], "Planner": {}}}
    planner = ServiceSpec("Planner", Role.PLANNER)
    box.launch = replace(
        box.launch,
        graph=replace(GRAPH, services=(*GRAPH.services, planner)),
        config={**box.launch.config, "Models": models},
    )
    box.new_reconciler()
    return box


async def test_a_loaded_model_has_as_many_workers_as_its_planner_wants(tmp_path: Path) -> None:
    box = planned_box(tmp_path)
    box.link.model_workers = '{"ant":2}'
    await box.settle()
    assert "ns_ant" not in box.states(), "a planner loads nothing"
    await asked(box, "ant")
    answering(box, ant=1)
    await box.settle()
    assert (box.states()["ns_ant"], box.states()["ns_ant_1"]) == ("ready", "ready")
    reported = box.link.fleet["models"]["ant"]
    assert (reported["planned_workers"], reported["workers"]["ready"], reported["gpus_each"]) == (2, 2, 1)
    box.link.model_workers = '{"ant":1}'
    await box.settle()
    assert (box.states()["ns_ant"], box.states()["ns_ant_1"]) == ("ready", "draining")


async def test_until_a_planner_has_said_something_a_model_keeps_the_workers_that_it_has(
    tmp_path: Path,
) -> None:
    box = planned_box(tmp_path)
    await asked(box, "ant")
    answering(box, ant=90)
    await box.settle()
    assert "ns_ant_1" not in box.states()


async def test_requests_count_again_when_the_planner_is_away_for_too_long(tmp_path: Path) -> None:
    box = planned_box(tmp_path)
    box.link.model_workers = '{"ant":1}'
    await asked(box, "ant")
    answering(box, ant=90)
    box.reconciler.record_exit(box.circus.end("ns_Planner"), 1)
    await box.reconciler.reconcile_once()
    assert box.states()["ns_Planner"] in ("backoff", "starting")
    assert "ns_ant_1" not in box.states(), "what it wanted last counts for a while"
    box.now += PLANNER_GRACE_S + 1
    await box.reconciler.reconcile_once()
    assert box.states()["ns_ant_1"] == "starting"


def pair_box(directory: Path, **planner: object) -> Box:
    """One GPU of 80 GiB: ant needs 50 GiB, and 25 GiB for its prefill worker; bee needs 50 GiB."""
    box = models_box(directory)
    ant = {**MODELS["ant"], "prefill": {"memory": "25GiB"}, **planner}
    prefill = ServiceSpec("ant-prefill", Role.PREFILL, gpus=1, model="ant", shares_memory=True)
    sections = {"ant-prefill": {"engine": "sim", "model": "ant"}}
    graph = replace(GRAPH, services=(*GRAPH.services, prefill))
    config = {**box.launch.config, **sections, "Models": {**MODELS, "ant": ant}}
    box.launch = replace(box.launch, graph=graph, config=config)
    box.new_reconciler()
    return box


async def test_a_disaggregated_model_is_loaded_with_its_prefill_worker_and_leaves_with_it(
    tmp_path: Path,
) -> None:
    box = pair_box(tmp_path)
    await asked(box, "ant")
    assert (box.states()["ns_ant"], box.states()["ns_ant-prefill"]) == ("ready", "ready")
    prefill = box.reconciler.workers["ns_ant-prefill"]
    assert (prefill.gpus, prefill.memory_bytes, prefill.role) == ((0,), 25 * GIB, Role.PREFILL)
    report = box.link.fleet["models"]["ant"]
    assert (report["workers"], report["prefill"]["workers"]) == ({"ready": 1}, {"ready": 1})
    assert report["prefill"]["memory_bytes"] == 25 * GIB
    assert "ant (prefill)" in box.statefile.learnt
    await asked(box, "bee")
    assert (box.states()["ns_ant"], box.states()["ns_ant-prefill"]) == ("draining", "draining")
    box.reconciler.record_exit(box.circus.end("ns_ant"), 0)
    await box.settle()
    assert box.states()["ns_bee"] == "ready", "there is room for it beside the prefill worker"
    box.reconciler.record_exit(box.circus.end("ns_ant-prefill"), 0)
    await box.settle()
    assert box.states() == {"ns_Frontend": "ready", "ns_bee": "ready"}


async def test_a_reconciler_that_starts_anew_keeps_the_pair_and_starts_no_second(tmp_path: Path) -> None:
    box = pair_box(tmp_path)
    await asked(box, "ant")
    pids = dict(box.circus.pids)
    box.new_reconciler()
    await box.settle()
    assert box.circus.pids == pids
    assert box.states()["ns_ant-prefill"] == "ready"


async def test_a_prefill_worker_that_lacked_memory_is_not_tried_with_as_little_and_its_model_goes_on(
    tmp_path: Path,
) -> None:
    box = pair_box(tmp_path)
    waiting(box, "ant")
    while "ns_ant-prefill" not in box.circus.pids:
        await box.reconciler.reconcile_once()
    log = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    (tmp_path / "ns_ant-prefill.log").write_text(log)
    box.reconciler.record_exit(box.circus.end("ns_ant-prefill"), 1)
    for _ in range(3):
        await box.settle()
        box.now += 400
    assert box.statefile.learnt["ant (prefill)"].failed_memory_bytes == 25 * GIB
    assert box.states() == {"ns_Frontend": "ready", "ns_ant": "ready", "ns_ant-prefill": "failed"}


async def test_a_planner_of_a_disaggregated_model_says_how_many_of_each_it_wants(tmp_path: Path) -> None:
    box = pair_box(tmp_path, Planner={"max-gpu-budget": 4})
    box.launch = replace(
        box.launch, gpus=tuple(Gpu(i, f"GPU-SIM-{i}", memory_bytes=80 * GIB) for i in (0, 1))
    )
    planner = ServiceSpec("Planner", Role.PLANNER)
    box.launch = replace(
        box.launch, graph=replace(box.launch.graph, services=(*box.launch.graph.services, planner))
    )
    box.new_reconciler()
    await asked(box, "ant")
    assert box.link.fleet["models"]["ant"]["prefill"]["planned_workers"] == 1
    box.link.model_workers = '{"ant":1,"ant (prefill)":2}'
    await box.settle()
    assert box.link.fleet["models"]["ant"]["prefill"]["workers"] == {"ready": 2}
    box.link.model_workers = '{"ant":1,"ant (prefill)":1}'
    await box.settle()
    assert box.link.fleet["models"]["ant"]["prefill"]["workers"] == {"ready": 1, "draining": 1}
