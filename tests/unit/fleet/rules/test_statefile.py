"""The statefile: its document, step by step, and its file."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynaplan.contract.gpus import Gpu
from dynaplan.fleet.rules.statefile import (
    Deployment,
    arbiter_of,
    fleet_of,
    from_json,
    initial,
    inventory_of,
    learnt_of,
    live_settings_of,
    planner_keys_of,
    to_json,
    with_commands,
    with_config,
    with_fleet,
    with_learnt,
    with_live_settings,
    with_planner_keys,
)
from dynaplan.fleet.statefile_store import NamespaceLock, StatefileStore, state_dir, statefile_path
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.graph.model import ServiceSpec
from dynaplan.models.model import Learnt
from dynaplan.process.identity import ProcessIdentity
from dynaplan.util.errors import DeploymentError, StatefileCorrupt, StatefileUnwritable
from dynaplan.util.masking import MASK, looks_secret, mask_secrets
from tests.unit.fleet.rules.graphs import BACKOFF, DRAINING, FAILED, READY, STARTING, box, graph
from tests.unit.fleet.rules.schema import violations

GOLDEN = Path(__file__).parents[4] / "statefiles"
SCHEMA = json.loads((GOLDEN / "statefile.schema.json").read_text())


def new_document() -> dict[str, Any]:
    services = (
        ServiceSpec("Frontend", Role.FRONTEND),
        ServiceSpec("Router", Role.SERVICE, in_process_of="Frontend"),
        ServiceSpec("VllmWorker", Role.DECODE, gpus=1, envs={"HF_TOKEN": "hf_secret", "HF_HOME": "/models"}),
    )
    command = "python -m dynaplan.worker.main graphs.agg:Frontend --service-name {} --worker-id 1"
    config = {
        "Common": {"model": "m", "api-key": "sk-secret"},
        "VllmWorker": {"ServiceArgs": {"workers": 1, "envs": {"HF_TOKEN": "hf_secret"}}},
    }
    return initial(
        Deployment(
            graph(*services),
            box(4),
            ProcessIdentity(4711, 123456, "00000000-0000-0000-0000-000000000000"),
            "ipc:///run/dynaplan/circus.sock",
            config,
            {name: command.format(name) for name in ("Frontend", "VllmWorker")},
            {"frontend": "http://127.0.0.1:8000", "log_dir": "/var/log/dynaplan"},
        )
    )


def running(name: str, component: str, role: Role, pid: int, gpus: tuple[int, ...] = ()) -> Worker:
    return Worker(
        name,
        component,
        role,
        READY,
        gpus,
        pid=pid,
        started_at=pid + 1000,
        instance_id=pid + 2000,
        url=f"http://127.0.0.1:{pid + 30000}",
        since_s=9.5,
    )


FRONTEND = running("dynamo_Frontend", "Frontend", Role.FRONTEND, 5001)
FIRST = running("dynamo_VllmWorker", "VllmWorker", Role.DECODE, 5002, (0,))
SECOND = running("dynamo_VllmWorker_1", "VllmWorker", Role.DECODE, 5003, (1,))
BROKEN = replace(
    FIRST,
    state=FAILED,
    gpus=(),
    pid=0,
    started_at=0,
    instance_id=0,
    url="",
    restarts_s=(1.0, 2.5),
    reason="exit code 1",
)
LIFE = {
    "initial": (FRONTEND, FIRST),
    "worker_added": (FRONTEND, FIRST, SECOND),
    "draining": (
        FRONTEND,
        FIRST,
        replace(SECOND, state=DRAINING, since_s=20.0, reason="1 of 2 VllmWorker wanted"),
    ),
    "worker_removed": (FRONTEND, FIRST),
    "none_left": (FRONTEND,),
    "failed": (FRONTEND, BROKEN),
}


@pytest.mark.parametrize("step", LIFE)
def test_every_step_of_its_life_is_the_golden_document(step: str) -> None:
    document = new_document()
    for name, fleet in LIFE.items():
        document = with_fleet(document, fleet)
        if name == step:
            break
    assert to_json(document) == (GOLDEN / f"{step}.json").read_text()


def test_the_next_workers_have_new_commands_and_running_ones_keep_theirs() -> None:
    before = with_fleet(new_document(), LIFE["worker_added"])
    third = replace(SECOND, name="dynamo_VllmWorker_2")
    after = with_fleet(with_commands(before, {"VllmWorker": "/new/python"}), (FRONTEND, FIRST, SECOND, third))
    commands = {name: each["cmd"].split()[0] for name, each in after["components"].items()}
    assert commands == {
        "dynamo_Frontend": "python",
        "dynamo_VllmWorker": "/new/python",
        "dynamo_VllmWorker_1": "python",
        "dynamo_VllmWorker_2": "/new/python",
    }


@pytest.mark.parametrize("step", LIFE)
def test_every_golden_document_fits_the_schema_and_reads_back(step: str) -> None:
    text = (GOLDEN / f"{step}.json").read_text()
    document = from_json(text)
    assert list(violations(document, SCHEMA, SCHEMA)) == []
    assert fleet_of(document) == LIFE[step]
    assert to_json(document) == text


def test_the_schema_check_finds_faults() -> None:
    document = json.loads((GOLDEN / "initial.json").read_text())
    document["components"]["dynamo_VllmWorker"] |= {"state": "gone", "pid": "7", "env": {"A": 1}}
    del document["arbiter"]["pid"]
    assert len(list(violations(document, SCHEMA, SCHEMA))) == 4


def test_the_initial_document_fits_the_schema_and_has_nobody() -> None:
    assert list(violations(new_document(), SCHEMA, SCHEMA)) == []
    assert fleet_of(new_document()) == ()


def test_no_secret_is_in_it() -> None:
    text = to_json(with_fleet(new_document(), (FRONTEND, FIRST)))
    assert "secret" not in text
    assert "/models" not in text
    assert MASK in text


def test_everything_about_a_worker_survives_the_file() -> None:
    waiting = replace(
        FIRST, state=BACKOFF, pid=0, started_at=0, retry_at_s=12.25, restarts_s=(3.5, 4.75), reason="x"
    )
    part = replace(SECOND, state=STARTING, gpu_share=0.5, memory_bytes=7)
    document = from_json(to_json(with_fleet(new_document(), (FRONTEND, waiting, part))))
    assert fleet_of(document) == (FRONTEND, waiting, part)
    assert inventory_of(document) == box(4)
    assert arbiter_of(document) == ProcessIdentity(4711, 123456, "00000000-0000-0000-0000-000000000000")


def test_unknown_fields_are_kept() -> None:
    document = with_fleet(new_document(), (FIRST, SECOND))
    document["ours_later"] = 1
    document["components"][SECOND.name]["note"] = "n"
    after = with_fleet(from_json(to_json(document)), (SECOND,))
    assert after["ours_later"] == 1
    assert after["components"][SECOND.name]["note"] == "n"


def test_a_worker_of_an_unknown_component_is_refused() -> None:
    with pytest.raises(StatefileCorrupt, match="dynamo_Other"):
        with_fleet(new_document(), (Worker("dynamo_Other", "Other", Role.SERVICE),))


def original() -> dict[str, Any]:
    """A document of Dynamo 0.3.2 after an add and the removal of the base prefill worker."""
    command = "python -m dynamo.sdk.cli.serve_dynamo graphs.disagg:Frontend --service-name {} --worker-id 1"
    entries = {
        "dynamo_Planner": ("Planner", {}),
        "dynamo_VllmWorker": ("VllmWorker", {"allocated_gpus": [0]}),
        "dynamo_VllmWorker_1": ("VllmWorker", {"allocated_gpus": ["2"]}),
        "dynamo_PrefillWorker": ("PrefillWorker", {}),
        "dynamo_Part_2": ("Part_2", {}),
    }
    components: dict[str, Any] = {
        name: {"watcher_name": name, "cmd": command.format(service), "resources": resources}
        for name, (service, resources) in entries.items()
    }
    components["dynamo_PrefillWorker"]["lease"] = None
    return {
        "namespace": "dynamo",
        "circus_endpoint": "tcp://127.0.0.1:50427",
        "components": components,
        "environment": {
            "DYNAMO_SERVICE_CONFIG": "{}",
            "SYSTEM_RESOURCES": {"total_gpus": 4, "gpu_info": ["0", "1", "2", "3"]},
        },
    }


def test_a_document_of_the_original_is_read() -> None:
    document = from_json(json.dumps(original()))
    assert [(worker.name, worker.component, worker.role, worker.gpus) for worker in fleet_of(document)] == [
        ("dynamo_Planner", "Planner", Role.PLANNER, ()),
        ("dynamo_VllmWorker", "VllmWorker", Role.DECODE, (0,)),
        ("dynamo_VllmWorker_1", "VllmWorker", Role.DECODE, (2,)),
        ("dynamo_Part_2", "Part_2", Role.SERVICE, ()),
    ]
    assert inventory_of(document)[3] == Gpu(3, "3")
    assert arbiter_of(document) is None
    assert fleet_of(with_fleet(document, fleet_of(document))) == fleet_of(document)


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda text: "", "empty"),
        (lambda text: text[:100], "not JSON"),
        (lambda text: "[]", "expected an object"),
        (lambda text: "[" * 100_000, "not JSON"),
        (lambda text: text.replace('"namespace"', '"space"'), "namespace"),
        (lambda text: text.replace('"version": 1', '"version": 99'), "newer dynaplan"),
        (lambda text: text.replace('"namespace": "dynamo"', '"namespace": 7'), "namespace is not a string"),
        (lambda text: text.replace('"env": {', '"env": 7, "was": {'), "is not an object"),
        (lambda text: text.replace('"ready"', '"gone"'), "gone"),
        (lambda text: text.replace('"pid": 5002', '"pid": "x"'), "'x'"),
        (lambda text: text.replace('"pid": 5002', '"pid": 1e999'), "infinity"),
        (
            lambda text: text.replace('"watcher_name": "dynamo_VllmWorker"', '"watcher_name": "b"'),
            "not its own",
        ),
    ],
)
def test_what_is_no_statefile_is_refused_with_the_reason(break_it: Callable[[str], str], reason: str) -> None:
    with pytest.raises(StatefileCorrupt, match=reason):
        from_json(break_it(to_json(with_fleet(new_document(), (FRONTEND, FIRST)))))


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("HF_TOKEN", True),
        ("api-key", True),
        ("apiKey", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("db_password", True),
        ("max-tokens", False),
        ("tokenizer", False),
        ("monkey", False),
        ("block-size", False),
    ],
)
def test_a_key_is_secret_by_its_whole_words(name: str, is_secret: bool) -> None:
    assert looks_secret(name) is is_secret


def test_secrets_are_masked_wherever_they_stand() -> None:
    config = {
        "token": {"deep": "s1"},
        "args": ["--api-key", "s2", "--port", "1", "--hub-token=s3"],
        "url": "https://user:s4@host/x",
        "Worker": {"ServiceArgs": {"envs": {"PLAIN": "1", "DB_PASS": "s5"}, "workers": 2}},
        "max-tokens": 7,
    }
    assert mask_secrets(config) == {
        "token": {"deep": MASK},
        "args": ["--api-key", MASK, "--port", "1", f"--hub-token={MASK}"],
        "url": f"https://{MASK}@host/x",
        "Worker": {"ServiceArgs": {"envs": {"PLAIN": "1", "DB_PASS": MASK}, "workers": 2}},
        "max-tokens": 7,
    }


# ---- the file


@pytest.fixture
def store(tmp_path: Path) -> StatefileStore:
    return StatefileStore(tmp_path / "state" / "dynamo.json")


def test_the_directory_is_the_one_that_the_environment_names(tmp_path: Path) -> None:
    assert state_dir({"DYN_LOCAL_STATE_DIR": str(tmp_path)}) == tmp_path
    assert state_dir({}) == Path.home() / ".dynamo" / "state"
    assert statefile_path({"DYN_LOCAL_STATE_DIR": str(tmp_path)}, "ns") == tmp_path / "ns.json"


def test_what_was_written_is_read_and_only_ours_to_read(store: StatefileStore) -> None:
    assert store.read() is None
    store.write(new_document())
    assert store.read() == new_document()
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700


def test_a_document_is_replaced_under_the_lock(
    store: StatefileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(new_document())
    os_replace = os.replace

    def replace_locked(*paths: Path) -> None:
        with open(store.path.with_suffix(".lock")) as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os_replace(*paths)

    monkeypatch.setattr(os, "replace", replace_locked)
    store.write(with_fleet(new_document(), (FIRST,)))
    assert fleet_of(store.read() or {}) == (FIRST,)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"null"])
def test_a_torn_file_is_told_with_its_path_and_can_be_set_aside(
    store: StatefileStore, content: bytes
) -> None:
    store.path.parent.mkdir()
    store.path.write_bytes(content)
    with pytest.raises(StatefileCorrupt, match=str(store.path)):
        store.read()
    assert store.set_aside().read_bytes() == content
    assert store.read() is None


def test_a_crash_before_the_rename_leaves_the_former_document(
    store: StatefileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(new_document())

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, crash)
            with pytest.raises(KeyboardInterrupt):
                store.write(with_fleet(new_document(), (FIRST,)))
        assert store.read() == new_document()
    store.write(with_fleet(new_document(), (FIRST,)))
    assert fleet_of(store.read() or {}) == (FIRST,)


def test_a_full_disk_is_told_and_leaves_the_former_document(
    store: StatefileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(new_document())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StatefileUnwritable, match=r"No space left on device\n.*DYN_LOCAL_STATE_DIR"):
        store.write(with_fleet(new_document(), (FIRST,)))
    assert store.read() == new_document()
    assert sorted(path.name for path in store.path.parent.iterdir()) == ["dynamo.json", "dynamo.lock"]


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StatefileUnwritable, match=r"Not a directory|File exists"):
        StatefileStore(tmp_path / "file" / "dynamo.json").write(new_document())


def test_only_its_own_file_is_removed(store: StatefileStore) -> None:
    other = StatefileStore(store.path.with_name("other.json"))
    other.write(new_document())
    store.write(new_document())
    store.remove()
    store.remove()
    assert sorted(path.name for path in store.path.parent.iterdir()) == ["other.json", "other.lock"]


def test_a_namespace_runs_once(store: StatefileStore) -> None:
    lock = NamespaceLock(store.path)
    with lock:
        with pytest.raises(
            DeploymentError, match=rf"namespace dynamo is already running here \(pid {os.getpid()}\)"
        ):
            NamespaceLock(store.path).acquire()
        store.write(new_document())
        with NamespaceLock(store.path.with_name("other.json")):
            pass
    with NamespaceLock(store.path):
        pass
    assert [path.name for path in store.path.parent.glob("*.serve.lock")] == []


def test_an_entry_of_the_original_whose_command_names_no_service_is_told_by_its_name() -> None:
    document = original()
    document["components"]["dynamo_VllmWorker_1"]["cmd"] = "sleep 60"
    found = {worker.name: worker.component for worker in fleet_of(from_json(json.dumps(document)))}
    assert found["dynamo_VllmWorker_1"] == "VllmWorker"


def test_the_planners_keys_are_kept_with_the_workers() -> None:
    document = with_planner_keys(new_document(), {"holds": "{}"})
    assert planner_keys_of(with_fleet(from_json(to_json(document)), [])) == {"holds": "{}"}
    assert list(violations(document, SCHEMA, SCHEMA)) == []


def test_live_settings_are_kept_with_the_workers() -> None:
    document = with_live_settings(new_document(), {"max_prefill_queue_size": "3"})
    known = with_fleet(from_json(to_json(document)), [])
    assert live_settings_of(known) == {"max_prefill_queue_size": "3"}
    assert list(violations(document, SCHEMA, SCHEMA)) == []


def test_what_was_learnt_of_models_is_kept_and_another_form_ignored() -> None:
    learnt = {"qwen": Learnt(memory_bytes=5, load_s=1.5)}
    document = from_json(to_json(with_learnt(new_document(), learnt)))
    assert learnt_of(document) == learnt
    assert learnt_of({**document, "models": {"a": 1, "b": {"load_s": "x"}}}) == {"b": Learnt()}
    assert learnt_of({**document, "models": []}) == {}


@pytest.mark.parametrize("keys", [None, [], "x", 7, {"holds": 7}])
def test_planners_keys_of_another_form_are_ignored(keys: Any) -> None:
    assert planner_keys_of({**new_document(), "planner_keys": keys}) == {}


def test_unknown_fields_pass_the_schema_at_every_depth_and_survive_a_rewrite() -> None:
    document = with_fleet(new_document(), [Worker("dynamo_VllmWorker", "VllmWorker", Role.DECODE)])
    entry = document["components"]["dynamo_VllmWorker"]
    document["owner"] = {"team": "a"}
    document["arbiter"]["note"] = 1
    document["environment"]["rack"] = "r1"
    entry["note"], entry["env"]["COLOUR"], entry["resources"]["numa"] = "mine", "blue", 1
    assert list(violations(document, SCHEMA, SCHEMA)) == []
    after = with_fleet(from_json(to_json(document)), fleet_of(document))
    assert (after["owner"], after["arbiter"]["note"], after["environment"]["rack"]) == (
        {"team": "a"},
        1,
        "r1",
    )
    assert after["components"]["dynamo_VllmWorker"]["note"] == "mine"
    assert after["components"]["dynamo_VllmWorker"]["env"]["COLOUR"] == "blue"


@pytest.mark.parametrize(
    "change",
    [{"pid": -1}, {"lease": 2**64}, {"since_s": float("inf")}, {"restarts_s": [float("nan")]}],
    ids=str,
)
def test_a_number_that_no_process_or_clock_has_is_corrupt(change: dict[str, Any]) -> None:
    document = json.loads((GOLDEN / "worker_added.json").read_text())
    name = next(worker.name for worker in fleet_of(document))
    document["components"][name] |= change
    with pytest.raises(StatefileCorrupt, match="negative or beyond all bounds"):
        from_json(json.dumps(document))


def test_a_reloaded_configuration_takes_the_place_of_the_old_one_without_its_secrets() -> None:
    before = new_document()
    after = with_config(before, {"VllmWorker": {"max-num-seqs": 16, "api-key": "sk-secret"}})
    config = json.loads(after["environment"]["DYNAMO_SERVICE_CONFIG"])
    assert config == {"VllmWorker": {"max-num-seqs": 16, "api-key": MASK}}
    assert inventory_of(after) == inventory_of(before)
