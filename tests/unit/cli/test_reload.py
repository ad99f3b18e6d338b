"""``dynaplan reload``: the difference is shown first, and half of a file is never applied."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dynaplan.cli import reload, restart
from dynaplan.cli.reload import ReloadRun, reload_lock
from dynaplan.cli.scale_counts import ScaleTimes
from dynaplan.contract.option_changes import OptionChange
from dynaplan.fleet import circus_client, deployments
from dynaplan.fleet.launch import LAUNCH_FILE, RELOADED_FILE, AdjustedOption, Reload, last_reload
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.store import connections
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import ConfigError, DeploymentError, PermanentError, StoreUnavailable
from tests.unit.fleet.rules.graphs import worker
from tests.unit.fleet.test_launch import LAUNCH

YAML = """
Common: {engine: sim, model: m}
Frontend: {api-key: secret}
VllmWorker:
  common-configs: [engine, model]
  max-num-seqs: 8
"""
GRAPH = GraphSpec(
    "graphs.agg:Frontend",
    str(Path(__file__).parents[3]),
    "ns",
    (
        ServiceSpec("Frontend", Role.FRONTEND),
        ServiceSpec("Processor", Role.SERVICE, in_process_of="Frontend"),
        ServiceSpec("VllmWorker", Role.DECODE, 1, 1),
        ServiceSpec("Planner", Role.PLANNER),
    ),
)


class Served:
    """A deployment that was served with a file, and the command typed beside it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = directory / "a.yaml"
        self.runtime_dir = directory
        self.applied: list[tuple[dict[str, str], list[str]]] = []
        self.write(YAML)
        found = SimpleNamespace(namespace="ns", runtime_dir=directory)
        monkeypatch.setattr(reload, "connect", lambda _: found)
        monkeypatch.chdir(directory)
        monkeypatch.setattr(reload, "ReloadRun", self._begin)
        monkeypatch.setattr(reload, "die_with_parent", lambda pid: None)
        self.launch = replace(LAUNCH, graph=GRAPH, config_file=str(self.file), runtime_dir=directory)

    def _begin(self, deployment: Any, graph: GraphSpec, new: Reload, timeout_s: float | None) -> Served:
        self.new = new
        return self

    def finish(self) -> None:
        """Have the last reload's settings as those that run."""
        (self.runtime_dir / RELOADED_FILE).write_text(replace(self.new, before=None).to_json())

    async def run(self, live: dict[str, str], services: list[ServiceSpec]) -> None:
        self.applied.append((live, [each.name for each in services]))

    def write(self, text: str) -> None:
        self.file.write_text(text)

    def serve(self, **changed: Any) -> None:
        """Have what the file says now as the configuration of ``serve``."""
        launch = replace(self.launch, **changed)
        new = reload._load_new_settings(replace(launch, config_file=str(self.file)), None, [])
        os.chdir(self.runtime_dir)
        (self.runtime_dir / LAUNCH_FILE).write_text(replace(launch, config=new.config).to_json())

    def typed(self, *arguments: str) -> Result:
        here = os.getcwd()
        try:
            return CliRunner().invoke(reload.command, list(arguments))
        finally:
            os.chdir(here)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    served = Served(tmp_path, monkeypatch)
    served.serve()
    return served


def test_an_unchanged_file_changes_nothing(served: Served) -> None:
    assert served.typed("-y").output == f"nothing has changed in {served.file}\n"
    assert served.applied == []


def test_automatic_frontends_are_as_many_as_before(served: Served) -> None:
    served.write(YAML.replace("{api-key: secret}", "{ServiceArgs: {workers: auto}}"))
    served.serve()
    assert served.typed("-y").output == f"nothing has changed in {served.file}\n"


def test_the_difference_is_shown_with_what_it_takes_and_secrets_are_not(served: Served) -> None:
    served.write(YAML.replace("8", "16").replace("secret", "other") + "  max-prefill-queue-size: 5\n")
    shown = served.typed("--dry-run").output
    assert "VllmWorker.max-num-seqs            8    16   rolling restart of VllmWorker" in shown
    assert "VllmWorker.max-prefill-queue-size  -    5    live" in shown
    assert "Frontend.api-key                   ***  ***  rolling restart of Frontend" in shown
    assert served.applied == []
    served.typed("-y")
    assert served.applied == [({"max_prefill_queue_size": "5"}, ["VllmWorker", "Frontend"])]


def test_a_setting_that_is_gone_has_its_usual_value_again(served: Served) -> None:
    served.write(YAML + "  max-prefill-queue-size: 5\n")
    served.serve()
    served.write(YAML)
    served.typed("-y")
    assert served.applied == [({"max_prefill_queue_size": "2"}, [])]


@pytest.mark.parametrize(("deadline_ms", "queue", "length"), [(500, "1000000", "0"), (0, "2", "1000")])
def test_limits_of_remote_prefill_that_are_gone_are_the_usual_ones_of_the_order_in_which_prompts_go(
    served: Served, deadline_ms: int, queue: str, length: str
) -> None:
    ordered = YAML + f"  prefill-deadline: {deadline_ms}\n"
    served.write(ordered + "  max-prefill-queue-size: 5\n  max-local-prefill-length: 7\n")
    served.serve()
    served.write(ordered)
    served.typed("-y")
    assert served.applied == [({"max_prefill_queue_size": queue, "max_local_prefill_length": length}, [])]


TARGETS = YAML + "  remote-prefill: true\nPlanner: {policy: sla, profile-results-dir: h100-bf16}\n"


@pytest.mark.parametrize(
    ("change", "row"),
    [
        (("max-num-seqs: 8", "max-num-seqs: 16"), "8  16  rolling restart of Planner, VllmWorker"),
        (
            ("  remote", "  router: kv\n  remote"),
            "-  kv  rolling restart of Frontend, Planner, VllmWorker",
        ),
        (("  remote", "  prefill-deadline: 0\n  remote"), "-  0  rolling restart of Frontend, Planner"),
        (("remote-prefill: true", "remote-prefill: false"), "rolling restart of Frontend, Planner"),
        (("  remote", "  swap-space: 4\n  remote"), "-  4  rolling restart of Planner, VllmWorker"),
        (("  remote", "  max-prefill-queue-size: 4\n  remote"), "-  4  live"),
    ],
)
def test_a_planner_for_targets_is_replaced_with_the_workers_and_frontends_that_it_has_a_model_of(
    served: Served, change: tuple[str, str], row: str
) -> None:
    served.write(TARGETS)
    served.serve()
    served.write(TARGETS.replace(*change))
    shown = [" ".join(line.split()) for line in served.typed("--dry-run").output.splitlines()]
    assert any(line.endswith(" " + " ".join(row.split())) for line in shown), shown


def test_a_planner_by_thresholds_knows_nothing_of_the_sizes_of_others(served: Served) -> None:
    served.write(YAML.replace("8", "16"))
    assert "rolling restart of VllmWorker\n" in served.typed("--dry-run").output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("  max-num-seq: 9\n", "VllmWorker.max-num-seq: unknown option"),
        ("  max-prefill-queue-size: many\n", "max-prefill-queue-size"),
        ("  : [\n", "a.yaml"),
        (
            "  ServiceArgs: {resources: {gpu: 2}}\n",
            "changing that needs a restart of `dynaplan serve`; nothing was applied",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_the_key_and_nothing_changes(
    served: Served, change: str, said: str
) -> None:
    served.write(YAML + change)
    refusal = served.typed("-y").exception
    assert isinstance(refusal, ConfigError)
    assert said in str(refusal)
    assert served.applied == []


def test_nobody_is_asked_where_nobody_can_answer(served: Served) -> None:
    served.write(YAML.replace("8", "16"))
    refusal = served.typed().exception
    assert isinstance(refusal, ConfigError)
    assert refusal.hint == "Add -y."


def test_a_setting_of_the_command_line_is_one_of_the_file_from_now_on(served: Served) -> None:
    shown = served.typed("--dry-run", "--VllmWorker.max-num-seqs=32").output
    assert "VllmWorker.max-num-seqs  8    32" in shown


def test_a_deployment_without_a_file_must_be_given_one(served: Served) -> None:
    served.serve(config_file="")
    refusal = served.typed("-y").exception
    assert isinstance(refusal, ConfigError)
    assert "dynaplan reload -f FILE" in refusal.hint
    assert "nothing has changed" in served.typed("-y", "-f", "a.yaml").output


def test_what_a_killed_reload_has_left_undone_is_still_a_difference(served: Served) -> None:
    before = reload._load_new_settings(served.launch, None, []).config
    served.write(YAML.replace("8", "16"))
    after = reload._load_new_settings(served.launch, None, [])
    (served.runtime_dir / RELOADED_FILE).write_text(replace(after, before=before).to_json())
    shown = served.typed("--dry-run").output
    assert "was interrupted" in shown
    assert "VllmWorker.max-num-seqs  8    16" in shown
    (served.runtime_dir / RELOADED_FILE).write_text(Reload(after.config, after.config_file).to_json())
    assert "nothing has changed" in served.typed("--dry-run").output


SLOTS = OptionChange("VllmWorker", "max-num-seqs", 8, 16, 1.0)


def test_the_planner_sets_one_option_and_what_else_is_new_in_the_file_waits(served: Served) -> None:
    served.write(TARGETS)
    served.serve()
    served.write(TARGETS + "  swap-space: 4\n")
    assert served.typed("-y", "--by-planner", SLOTS.to_text()).exit_code == 0
    assert served.applied == [({}, ["VllmWorker", "Planner"])]
    assert served.new.config["VllmWorker"]["max-num-seqs"] == 16
    assert served.new.adjusted == (AdjustedOption("VllmWorker", "max-num-seqs", 8, 16),)
    assert "swap-space" not in served.new.config["VllmWorker"]


def test_a_reload_by_a_person_keeps_what_the_planner_has_set_unless_the_person_sets_it(
    served: Served,
) -> None:
    served.typed("-y", "--by-planner", SLOTS.to_text())
    served.finish()
    assert "nothing has changed" in served.typed("--dry-run").output
    assert "max-num-seqs  16   8 " in served.typed("--dry-run", "--VllmWorker.max-num-seqs=8").output
    served.write(YAML.replace("8", "12") + "  swap-space: 4\n")
    assert "max-num-seqs  16   12" in served.typed("-y").output
    assert served.new.adjusted == ()


def test_a_value_that_is_taken_back_is_the_persons_again(served: Served) -> None:
    for change in (SLOTS, replace(SLOTS, before=16, after=32), replace(SLOTS, before=32, after=8)):
        served.typed("-y", "--by-planner", change.to_text())
        served.finish()
    assert served.new.config["VllmWorker"]["max-num-seqs"] == 8
    assert served.new.adjusted == ()


def test_an_option_keeps_the_name_that_it_is_configured_by(served: Served) -> None:
    config = {"VllmWorker": {"engine": "llamacpp", "parallel": 8}}
    (served.runtime_dir / LAUNCH_FILE).write_text(replace(served.launch, config=config).to_json())
    served.typed("-y", "--by-planner", SLOTS.to_text())
    assert served.new.config["VllmWorker"]["parallel"] == 16
    assert "max-num-seqs" not in served.new.config["VllmWorker"]


def test_a_change_of_the_planner_that_was_killed_goes_on_and_one_that_is_made_does_nothing(
    served: Served,
) -> None:
    served.typed("-y", "--by-planner", SLOTS.to_text())
    (served.runtime_dir / RELOADED_FILE).write_text(served.new.to_json())
    assert served.typed("-y", "--by-planner", SLOTS.to_text()).exit_code == 0
    assert len(served.applied) == 2
    assert served.new.before
    assert served.new.before["VllmWorker"]["max-num-seqs"] == 8
    served.finish()
    assert served.typed("-y", "--by-planner", SLOTS.to_text()).output == "VllmWorker.max-num-seqs is 16\n"
    assert len(served.applied) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replace(SLOTS, before=4), "VllmWorker.max-num-seqs is 8, not 4 any more"),
        (replace(SLOTS, component="Frontend"), "Frontend has no engine"),
        (replace(SLOTS, option="swap-space"), "VllmWorker has no swap-space that is known"),
    ],
)
def test_the_planner_overrules_nobody(served: Served, change: OptionChange, said: str) -> None:
    refusal = served.typed("-y", "--by-planner", change.to_text()).exception
    assert isinstance(refusal, DeploymentError)
    assert said in str(refusal)
    assert served.applied == []


def test_a_persons_interrupted_reload_is_not_finished_by_the_planner(served: Served) -> None:
    before = reload._load_new_settings(served.launch, None, [])
    unfinished = replace(before, before=before.config)
    (served.runtime_dir / RELOADED_FILE).write_text(unfinished.to_json())
    refusal = served.typed("-y", "--by-planner", SLOTS.to_text()).exception
    assert isinstance(refusal, DeploymentError)
    assert "a reload was interrupted" in str(refusal)


def test_the_planners_change_is_made_after_the_reload_of_a_person_that_is_under_way(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    persons = reload._load_new_settings(served.launch, None, ["--VllmWorker.swap-space=4"])
    file = served.runtime_dir / RELOADED_FILE
    file.write_text(replace(persons, before=persons.config).to_json())

    def flock(descriptor: int, operation: int) -> None:
        """A lock that is free once the person's reload has finished."""
        assert not operation & fcntl.LOCK_NB
        file.write_text(persons.to_json())

    monkeypatch.setattr(fcntl, "flock", flock)
    assert served.typed("-y", "--by-planner", SLOTS.to_text()).exit_code == 0
    assert served.new.config["VllmWorker"]["max-num-seqs"] == 16
    assert served.new.config["VllmWorker"]["swap-space"] == 4


@pytest.mark.parametrize("is_changed", [False, True])
def test_what_was_shown_is_not_applied_where_the_settings_have_changed_before_the_answer(
    served: Served, monkeypatch: pytest.MonkeyPatch, is_changed: bool
) -> None:
    served.typed("-y", "--by-planner", SLOTS.to_text())
    served.applied.clear()

    def confirm(text: str, **options: Any) -> None:
        if is_changed:
            served.finish()

    monkeypatch.setattr(reload.click, "confirm", confirm)
    monkeypatch.setattr(reload, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    served.write(YAML + "  swap-space: 4\n")
    answer = served.typed()
    assert bool(served.applied) is not is_changed
    assert ("have changed since they were shown" in str(answer.exception)) is is_changed


def test_a_launch_that_cannot_be_read_is_said(served: Served) -> None:
    (served.runtime_dir / LAUNCH_FILE).write_text("{}")
    refusal = served.typed("-y").exception
    assert isinstance(refusal, DeploymentError)


OLD, NEW = {"VllmWorker": {"max-num-seqs": 8}}, {"VllmWorker": {"max-num-seqs": 16}}
_, _, DECODE, _ = GRAPH.services
FRONTEND = GRAPH.services[0]
LIVE_KEY = "/ns/disagg_router/max_prefill_queue_size"


class Box:
    """A deployment of a frontend and two decode workers, which does at once what it is told.

    Every process has the settings that were in the file when it was started.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = MemoryStore(SystemClock())
        self.started: list[str] = []
        self.fails: Callable[[str], bool] = lambda name: False
        self.pid = 100
        self.settings: dict[tuple[str, int], Any] = {}
        self.workers = (
            self.process(Worker("ns_Frontend", "Frontend", Role.FRONTEND, WorkerState.READY)),
            self.process(replace(worker("VllmWorker"), name="ns_VllmWorker")),
            self.process(replace(worker("VllmWorker_1"), name="ns_VllmWorker_1")),
        )

    def process(self, started: Worker) -> Worker:
        self.pid += 1
        found = last_reload(self.directory)
        self.settings[started.name, self.pid] = found.config if found else OLD
        return replace(started, pid=self.pid)

    def replace(self, old: Worker) -> str:
        self.started.append(old.name)
        if self.fails(old.name):
            raise PermanentError("1 of 2 decode workers ready")
        self.workers = tuple(self.process(each) if each.name == old.name else each for each in self.workers)
        return old.name

    @property
    def found(self) -> Any:
        return SimpleNamespace(
            namespace="ns",
            workers=self.workers,
            runtime_dir=self.directory,
            circus_endpoint="ipc://x",
            document={"environment": {}},
        )

    @property
    def seen(self) -> list[Any]:
        """The settings that each process has, in order of the workers."""
        return [self.settings[each.name, each.pid] for each in self.workers]

    def client(self, endpoint: str, *, sender: str) -> Any:
        """Be the client of a person: as the fleet plugin's, ``restart`` would have circus restart it."""
        assert sender == circus_client.A_PERSON
        return self

    async def call(self, command: str, name: str) -> None:
        old = next(each for each in self.workers if each.name == name)
        with suppress(PermanentError):
            self.replace(old)

    def close(self) -> None:
        """The client of circus needs no closing here."""


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    box = Box(tmp_path)

    class Restart:
        starts_new_first = True

        def __init__(self, store: Any, namespace: str, old: Worker, timeout_s: float | None) -> None:
            self.old = old

        async def run(self, gpu_wait_s: float) -> str:
            return box.replace(self.old)

    async def closed() -> None:
        return None

    monkeypatch.setattr(box.store, "close", closed)
    monkeypatch.setattr(restart, "WorkerRestart", Restart)
    monkeypatch.setattr(reload, "expected_times", lambda found, wanted: ScaleTimes(1.0, 1.0))
    monkeypatch.setattr(restart, "expected_times", lambda found, wanted: ScaleTimes(1.0, 1.0))
    monkeypatch.setattr(circus_client, "CircusClient", box.client)
    monkeypatch.setattr(deployments, "find_deployment", lambda namespace: box.found)
    monkeypatch.setattr(connections, "connect_store", lambda: box.store)
    launch = replace(LAUNCH, graph=GRAPH, config=OLD, runtime_dir=tmp_path)
    (tmp_path / LAUNCH_FILE).write_text(launch.to_json())
    return box


def reload_of(box: Box, timeout_s: float | None = None) -> ReloadRun:
    return ReloadRun(box.found, GRAPH, Reload(NEW, "a.yaml", before=OLD), timeout_s)


async def test_every_process_that_reads_a_setting_has_the_new_one_afterwards(box: Box) -> None:
    await reload_of(box).run({"max_prefill_queue_size": "5"}, [DECODE, FRONTEND])
    assert box.started == ["ns_VllmWorker", "ns_VllmWorker_1", "ns_Frontend"]
    assert box.seen == [NEW, NEW, NEW]
    item = await box.store.get(LIVE_KEY)
    assert item and item.value == "5"
    assert last_reload(box.directory) == Reload(NEW, "a.yaml")


async def test_when_a_new_worker_fails_all_have_the_settings_of_before_again(box: Box) -> None:
    await box.store.put(LIVE_KEY, "3")
    box.fails = lambda name: name == "ns_VllmWorker_1" and box.started.count(name) == 1
    with pytest.raises(PermanentError, match="the new settings do not work: 1 of 2 decode workers ready"):
        await reload_of(box).run({"max_prefill_queue_size": "5"}, [DECODE, FRONTEND])
    assert box.started == ["ns_VllmWorker", "ns_VllmWorker_1", "ns_VllmWorker"]
    assert box.seen == [OLD, OLD, OLD]
    item = await box.store.get(LIVE_KEY)
    assert item and item.value == "3"
    last = last_reload(box.directory)
    assert last and (last.config, last.before) == (OLD, None)


async def test_workers_go_back_also_when_the_store_is_away(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> bool:
        async def is_away(*arguments: Any) -> None:
            raise StoreUnavailable("etcd does not answer")

        monkeypatch.setattr(box.store, "commit", is_away)
        return True

    box.fails = fails
    with pytest.raises(PermanentError, match="and the rollback failed: etcd does not answer") as failed:
        await reload_of(box, 0.0).run({"max_prefill_queue_size": "5"}, [FRONTEND])
    assert "`dynaplan status` shows what runs" in str(failed.value)


async def test_a_frontend_that_does_not_come_back_is_told_and_goes_back_too(box: Box) -> None:
    box.fails = lambda name: name == "ns_Frontend"
    with pytest.raises(PermanentError, match="nothing has taken the place of ns_Frontend within 0 s"):
        await reload_of(box, 0.0).run({}, [FRONTEND])
    last = last_reload(box.directory)
    assert last and last.config == OLD


async def test_an_interrupted_reload_leaves_the_settings_of_before(
    box: Box, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> bool:
        raise asyncio.CancelledError

    box.fails = interrupted
    with pytest.raises(asyncio.CancelledError):
        await reload_of(box).run({"max_prefill_queue_size": "5"}, [DECODE])
    last = last_reload(box.directory)
    assert last and (last.config, last.before) == (OLD, None)
    assert await box.store.get(LIVE_KEY) is None
    assert "Interrupted" in capsys.readouterr().err


async def test_two_reloads_do_not_go_on_at_once(box: Box) -> None:
    with (
        reload_lock(box.found),
        pytest.raises(DeploymentError, match="another reload or upgrade of ns is in progress"),
    ):
        await reload_of(box).run({}, [])
    await reload_of(box).run({}, [])


def test_an_error_of_a_reload_is_not_taken_for_another_one(box: Box) -> None:
    with pytest.raises(BlockingIOError), reload_lock(box.found):
        raise BlockingIOError
