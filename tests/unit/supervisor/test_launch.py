"""What is handed to the plugin and to circus."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dynaplan.domain.errors import DeploymentError
from dynaplan.domain.gpus import Gpu
from dynaplan.domain.graph import GraphSpec, ServiceSpec
from dynaplan.domain.identity import ProcessIdentity
from dynaplan.domain.lifecycle import Role, Worker
from dynaplan.domain.settings.worker import ProcessSettings
from dynaplan.supervisor.banner import banner
from dynaplan.supervisor.launch import Launch
from dynaplan.supervisor.runtime_dir import make_runtime_directory, runtime_directory, write_private
from dynaplan.supervisor.watchers import server_watcher, worker_watcher

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
    assert server_watcher("ns_etcd", ["/my bin/etcd", "--x"], "/").command_line == "'/my bin/etcd' --x"


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


def test_the_runtime_directory_is_private_new_and_short(tmp_path: Path) -> None:
    directory = runtime_directory("ns", {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert len(str(directory)) < 90
    directory = tmp_path / f"dynaplan-{os.getuid()}" / "ns"
    make_runtime_directory(directory)
    write_private(directory / "secret", "x")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "secret").stat().st_mode & 0o777 == 0o600
    make_runtime_directory(directory)
    assert list(directory.iterdir()) == []


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
    directory = runtime_directory("ns", {"XDG_RUNTIME_DIR": base})
    assert directory == Path(f"/tmp/dynaplan-{os.getuid()}/ns")


def test_a_long_namespace_still_gets_a_path_short_enough_for_sockets() -> None:
    directory = runtime_directory("n" * 90, {})
    assert len(os.fsencode(directory / "circus-events.sock")) <= 107


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
