"""What is handed to the plugin and to circus."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.config.service_config import CONFIG_VARIABLE
from dynaplan.config.settings.worker import ProcessSettings
from dynaplan.contract.gpus import Gpu
from dynaplan.fleet.launch import RELOADED_FILE, AdjustedOption, CurrentLaunch, Launch, Reload
from dynaplan.fleet.runtime_dir import (
    address_directory,
    ensure_link,
    link_root,
    make_runtime_directory,
    remove_runtime_directory,
    runtime_directory,
    write_private,
)
from dynaplan.fleet.serve import banner
from dynaplan.fleet.watchers import embedded_watcher, worker_watcher
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.process.identity import ProcessIdentity
from dynaplan.util.errors import DeploymentError

LAUNCH = Launch(
    graph=GraphSpec(
        "graphs.disagg:Frontend",
        "/some where",
        "ns",
        (
            ServiceSpec("Frontend", Role.FRONTEND),
            ServiceSpec("VllmWorker", Role.DECODE, 2, 1, {"HF_HOME": "/models"}),
        ),
    ),
    gpus=(Gpu(0, "GPU-a"), Gpu(1, "GPU-b")),
    arbiter=ProcessIdentity(1, 2, "boot"),
    config={"Common": {"model": "some/model"}},
    runtime_dir=Path("/run/x"),
    log_dir=Path("/logs"),
    statefile=Path("/state/ns.json"),
    circus_endpoint="ipc:///run/x/circus.sock",
    circus_events="ipc:///run/x/events.sock",
    host="0.0.0.0",
    port=8000,
)


def test_a_launch_survives_its_file() -> None:
    assert Launch.from_json(LAUNCH.to_json()) == LAUNCH


def test_options_that_the_planner_has_set_survive_the_files_and_are_the_launchs() -> None:
    adjusted = (AdjustedOption("VllmWorker", "max-num-seqs", None, 16),)
    reload = Reload({}, adjusted=adjusted)
    assert Reload.from_json(reload.to_json()) == reload
    launch = reload.applied_to(LAUNCH)
    assert Launch.from_json(launch.to_json()).adjusted == adjusted


def test_a_worker_watcher_restarts_nothing_and_holds_only_what_differs() -> None:
    worker = Worker("ns_VllmWorker_1", "VllmWorker", Role.DECODE, gpus=(1,))
    watcher = worker_watcher(LAUNCH, worker)
    assert watcher.options["respawn"] is False
    assert watcher.options["copy_env"] is True
    assert watcher.options["numprocesses"] == 1
    assert watcher.options["working_dir"] == "/some where"
    assert watcher.options["env"] == {
        "HF_HOME": "/models",
        "DYNAPLAN_WORKER_NAME": "ns_VllmWorker_1",
        "DYNAPLAN_GPUS": "1",
        "CUDA_VISIBLE_DEVICES": "GPU-b",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert watcher.command_line.endswith(
        "-m dynaplan.worker.main graphs.disagg:Frontend --service-name VllmWorker --worker-id 1"
    )


def test_a_command_with_spaces_stays_one_word() -> None:
    server: Any = SimpleNamespace(name="etcd", cmd=["/my bin/etcd", "--x"], without=(), working_dir="/")
    watcher = embedded_watcher(LAUNCH, server)
    assert watcher.name == "ns_etcd"
    assert watcher.command_line.endswith(" '/my bin/etcd' --x")


def test_the_banner_tells_where_everything_is_and_what_to_try() -> None:
    text = banner(LAUNCH, is_simulated=True)
    for part in (
        "http://127.0.0.1:8000",
        "/logs",
        "/state/ns.json",
        "2 simulated GPUs",
        '"model": "some/model"',
    ):
        assert part in text
    assert "circusctl --endpoint ipc:///run/x/circus.sock status" in text
    assert "store" not in text
    assert "store        file, /kv" in banner(LAUNCH, is_simulated=True, store="file, /kv")


def test_a_graph_of_ones_own_is_told_with_a_request_for_each_public_endpoint() -> None:
    services = (
        ServiceSpec("Frontend", Role.SERVICE, public_endpoints=("generate", "echo")),
        ServiceSpec("Backend", Role.SERVICE),
    )
    launch = replace(LAUNCH, graph=replace(LAUNCH.graph, services=services), is_protected=True)
    assert Launch.from_json(launch.to_json()) == launch
    tries = [line for line in banner(launch, is_simulated=True).splitlines() if line.startswith("  try")]
    assert [line.split("http://127.0.0.1:8000/")[1].split()[0] for line in tries] == ["generate", "echo"]
    assert all("$DYNAPLAN_API_KEY" in line for line in tries)


def test_the_request_to_try_bears_a_key_where_a_file_has_them() -> None:
    launch = replace(LAUNCH, config={**LAUNCH.config, "Frontend": {"api-keys": "keys.yaml"}})
    assert '-H "Authorization: Bearer $OPENAI_API_KEY"' in banner(launch, is_simulated=True)
    assert "Authorization" not in banner(LAUNCH, is_simulated=True)


def test_the_runtime_directory_lies_beside_the_statefile_private_and_new(tmp_path: Path) -> None:
    directory = runtime_directory(tmp_path / "ns.v1.json")
    assert directory == tmp_path / "run" / os.uname().nodename / "ns.v1"
    make_runtime_directory(directory)
    write_private(directory / "secret", "x")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "secret").stat().st_mode & 0o777 == 0o600
    assert [each.name for each in directory.iterdir()] == ["secret"]
    with pytest.raises(UnicodeEncodeError):
        write_private(directory / "secret", "\ud800")
    assert (directory / "secret").read_text() == "x", "it is replaced as a whole, or stays"
    make_runtime_directory(directory)
    assert list(directory.iterdir()) == []
    remove_runtime_directory(directory)
    assert list(tmp_path.iterdir()) == []


def test_a_runtime_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    with pytest.raises(DeploymentError, match="not private"):
        make_runtime_directory(root / "ns")


def test_a_link_in_place_of_the_runtime_directory_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    (root / "ns").symlink_to(elsewhere)
    make_runtime_directory(root / "ns")
    assert (elsewhere / "precious").exists()
    assert not (root / "ns").is_symlink()
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(DeploymentError, match="not private"):
        make_runtime_directory(tmp_path / "link" / "ns")


@pytest.mark.parametrize("base", ["/does/not/exist", "relative", "", "/tmp/with space"])
def test_an_unusable_xdg_runtime_dir_is_passed_over(base: str) -> None:
    assert link_root({"XDG_RUNTIME_DIR": base}) == Path(f"/tmp/dynaplan-{os.getuid()}")


def test_a_directory_that_the_user_could_not_make_again_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for unwritable, parent in (("/", "/run/user/1000"), ("/run/user", "/tmp")):
        monkeypatch.setattr(os, "access", lambda path, _, no=unwritable: str(path) != no)
        assert link_root({"XDG_RUNTIME_DIR": "/run/user/1000"}).parent == Path(parent)


@pytest.mark.parametrize("name", ["n" * 90, "with space", "with,comma"])
def test_a_path_that_cannot_be_an_address_gets_a_short_link(name: str, tmp_path: Path) -> None:
    assert address_directory(Path("/srv/state/run/box/dynamo"), {}) == Path("/srv/state/run/box/dynamo")
    runtime_dir = tmp_path / name
    runtime_dir.mkdir()
    link = address_directory(runtime_dir, {"XDG_RUNTIME_DIR": "/nowhere"})
    assert len(os.fsencode(link / "circus-events.sock")) <= 107
    link = tmp_path / "links" / link.name
    assert ensure_link(link, runtime_dir)
    assert not ensure_link(link, runtime_dir)
    link.unlink()
    link.symlink_to(tmp_path)
    assert ensure_link(link, runtime_dir)
    assert link.resolve() == runtime_dir
    assert (tmp_path / "links").stat().st_mode & 0o777 == 0o700
    assert not ensure_link(runtime_dir, runtime_dir)


def test_an_engine_that_may_take_long_does_not_make_its_process_wait_longer_for_an_answer() -> None:
    worker = {"hang-timeout": 600, "drain-deadline": 20}
    launch = replace(LAUNCH, config={"VllmWorker": worker, "Backend": {"health-timeout": 5}})
    assert launch.health_timeout_of("VllmWorker") == ProcessSettings.health_timeout_s == 30
    assert launch.health_timeout_of("Backend") == 5
    assert launch.leave_timeout_of("VllmWorker") == 20
    assert launch.leave_timeout_of("Backend") == ProcessSettings.drain_deadline_s == 600


def test_what_a_service_of_the_users_own_means_by_our_keys_is_its_own_affair() -> None:
    launch = replace(LAUNCH, config={"Backend": {"drain-deadline": "soon"}})
    assert launch.leave_timeout_of("Backend") == 600


def test_a_launch_has_the_settings_of_the_last_reload_from_when_they_are_there(tmp_path: Path) -> None:
    launch = replace(LAUNCH, runtime_dir=tmp_path)
    current = CurrentLaunch(launch)
    assert current.now == launch
    new = {"Common": {"model": "another/model"}}
    write_private(tmp_path / RELOADED_FILE, Reload(new, "b.yaml", ("--X.y=1",)).to_json())
    now = current.now
    assert (now.config, now.config_file, now.overrides) == (new, "b.yaml", ("--X.y=1",))
    worker = Worker("ns_VllmWorker_1", "VllmWorker", Role.DECODE, gpus=(1,))
    assert json.loads(worker_watcher(now, worker).options["env"][CONFIG_VARIABLE]) == new
    assert CONFIG_VARIABLE not in worker_watcher(launch, worker).options["env"]
    (tmp_path / RELOADED_FILE).write_text("{")
    assert current.now.config == new
