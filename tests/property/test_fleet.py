"""Any history of a fleet: decisions, crashes, drains, claims of others, and deaths of the supervisor."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynaplan.contract.gpus import Gpu
from dynaplan.fleet.rules.reconcile import Reconciled, reconcile
from dynaplan.fleet.rules.restarting import after_exit
from dynaplan.fleet.rules.statefile import Deployment, fleet_of, from_json, initial, to_json, with_fleet
from dynaplan.graph.lifecycle import (
    COUNTS,
    EXIT_CANNOT_START,
    HOLDS_GPUS,
    Role,
    Worker,
    WorkerEvent,
    WorkerState,
)
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.process.identity import ProcessIdentity
from dynaplan.util.errors import StatefileCorrupt

INVENTORY = tuple(Gpu(index, f"GPU-SIM-{index}") for index in range(6))
WITH_PROCESS = frozenset({WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING})


class Fleet(RuleBasedStateMachine):
    """A supervisor that writes down, acts, is killed, and reads again; and processes that do as they like."""

    @initialize(decode=st.sampled_from([1, 2, 0.5]), prefill=st.sampled_from([1, 0.3, 0]))
    def start(self, decode: float, prefill: float) -> None:
        services = (
            ServiceSpec("Frontend", Role.FRONTEND),
            ServiceSpec("VllmWorker", Role.DECODE, 1, decode),
            ServiceSpec("VllmWorker_1", Role.PREFILL, 1, prefill),
        )
        self.graph = GraphSpec("g:Frontend", "/", "ns", services)
        self.document = initial(Deployment(self.graph, INVENTORY, ProcessIdentity(1, 1, "b"), "ipc://x"))
        self.fleet: tuple[Worker, ...] = ()
        self.desired: dict[str, int] = {}
        self.foreign: frozenset[int] = frozenset()
        self.now_s = 0.0
        self.reconcile()

    def decide(self, retry_failed: bool = False) -> Reconciled:
        owned = {index for worker in self.fleet if worker.state in HOLDS_GPUS for index in worker.gpus}
        return reconcile(
            self.graph,
            self.fleet,
            self.desired,
            INVENTORY,
            dict.fromkeys(self.foreign - owned, "taken"),
            self.now_s,
            retry_failed,
        )

    def reconcile(self, retry_failed: bool = False) -> None:
        before, after = self.fleet, self.decide(retry_failed)
        self.check(after, before)
        self.fleet = after.fleet
        self.document = with_fleet(self.document, self.fleet)
        assert not list(self.decide().steps(self.fleet)), "reconciling converges in one step"

    def check(self, after: Reconciled, fleet: tuple[Worker, ...]) -> None:
        before = {worker.name: worker for worker in fleet}
        staying = before.keys() - after.removed
        started = {worker.name for worker in after.started(fleet)}
        assert not started & staying, "two workers never have one name"
        for name in after.removed:
            assert before[name].state not in WITH_PROCESS, "a running process is never forgotten"
        assert staying == {worker.name for worker in after.fleet} - started, "nobody else is forgotten"
        for step, worker in after.steps(fleet):
            match step:
                case "remove":
                    assert worker is before[worker.name]
                    assert worker.name in after.removed
                case "drain":
                    assert worker.state is WorkerState.DRAINING
                    assert before[worker.name].state in (WorkerState.STARTING, WorkerState.READY)
                    self.check_order(before[worker.name], after)
                case "restart":
                    assert worker.state is WorkerState.STARTING
                    assert before[worker.name].state is WorkerState.BACKOFF, (
                        "only a crashed worker is restarted"
                    )
                    assert before[worker.name].gpus == worker.gpus
                case "start":
                    assert worker.name in started
                case _:
                    raise AssertionError(step)

    def check_order(self, leaves: Worker, after: Reconciled) -> None:
        """A ready worker leaves last: those without requests have left."""
        if leaves.state is WorkerState.READY:
            alike = [each for each in after.fleet if each.component == leaves.component]
            assert all(each.state in (WorkerState.READY, WorkerState.DRAINING) for each in alike)

    @rule(component=st.sampled_from(["Frontend", "VllmWorker", "VllmWorker_1"]), number=st.integers(-1, 9))
    def scale(self, component: str, number: int) -> None:
        self.desired[component] = number
        self.reconcile(retry_failed=True)

    @precondition(lambda self: any(worker.state in WITH_PROCESS for worker in self.fleet))
    @rule(data=st.data(), exit_code=st.sampled_from([0, 1, -9, EXIT_CANNOT_START, None]))
    def exit(self, data: st.DataObject, exit_code: int | None) -> None:
        running = [worker for worker in self.fleet if worker.state in WITH_PROCESS]
        worker = data.draw(st.sampled_from(running))
        after = after_exit(worker, exit_code, self.now_s)
        if worker.state is WorkerState.DRAINING:
            assert after.state is WorkerState.STOPPED, "a draining worker is never restarted"
        else:
            assert after.state in (WorkerState.BACKOFF, WorkerState.FAILED), "a crashed one is, or fails"
        self.fleet = tuple(after if each is worker else each for each in self.fleet)
        self.document = with_fleet(self.document, self.fleet)
        self.reconcile()

    @rule()
    def become_ready(self) -> None:
        self.fleet = tuple(
            worker.after(WorkerEvent.REGISTERED, self.now_s)
            if worker.state is WorkerState.STARTING
            else worker
            for worker in self.fleet
        )
        self.reconcile()

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0, 120.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.reconcile()
        waiting = [worker for worker in self.fleet if worker.state is WorkerState.BACKOFF]
        assert all(worker.retry_at_s > self.now_s for worker in waiting), "whoever is due was restarted"

    @rule(gpus=st.frozensets(st.integers(0, 5), max_size=3))
    def others_claim(self, gpus: frozenset[int]) -> None:
        owned = {index for worker in self.fleet if worker.state in HOLDS_GPUS for index in worker.gpus}
        self.foreign = gpus - owned
        self.reconcile()

    @rule(cut=st.floats(0, 1))
    def supervisor_dies(self, cut: float) -> None:
        """The plugin is killed: a part of a document is never taken for one."""
        text = to_json(self.document)
        part = text[: int(cut * (len(text) - 3))]
        try:
            from_json(part)
        except StatefileCorrupt:
            pass
        else:
            raise AssertionError("a torn statefile was taken for a whole one")
        self.fleet = fleet_of(from_json(text))
        self.reconcile()

    @invariant()
    def nobody_shares_what_is_his(self) -> None:
        if not hasattr(self, "fleet"):
            return
        shares: dict[int, list[float]] = {}
        for worker in self.fleet:
            for index in worker.gpus if worker.state in HOLDS_GPUS else ():
                shares.setdefault(index, []).append(worker.gpu_share)
        assert shares.keys() <= {gpu.index for gpu in INVENTORY} - self.foreign
        assert all(sum(held) <= 1 + 1e-9 for held in shares.values())

    @invariant()
    def names_are_unique_whatever_their_case(self) -> None:
        if hasattr(self, "fleet"):
            assert len({worker.name.lower() for worker in self.fleet}) == len(self.fleet)

    @invariant()
    def never_more_than_wanted(self) -> None:
        if not hasattr(self, "fleet"):
            return
        for service in self.graph.services:
            number = self.desired.get(service.name, -1)
            wanted = service.workers if number < 0 else number
            mine = [worker for worker in self.fleet if worker.component == service.name]
            assert sum(worker.state in COUNTS for worker in mine) <= wanted

    @invariant()
    def the_statefile_tells_the_fleet(self) -> None:
        if hasattr(self, "fleet"):
            document = from_json(to_json(with_fleet(self.document, self.fleet)))
            assert sorted(fleet_of(document), key=lambda worker: worker.name) == sorted(
                (worker for worker in self.fleet if worker.state is not WorkerState.STOPPED),
                key=lambda worker: worker.name,
            )


Fleet.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestFleet = Fleet.TestCase
