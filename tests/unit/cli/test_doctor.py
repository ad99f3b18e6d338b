"""``dynaplan doctor`` as a user types it."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dynaplan.cli import doctor
from dynaplan.cli.doctor import Finding, Level, command, page
from dynaplan.contract.gpus import Gpu, GpuProcess, GpuUse
from dynaplan.engines import requirements
from dynaplan.engines.timing_model.learnt_timing import LearntTiming, StepLine
from dynaplan.fleet import deployments, gpu_devices
from dynaplan.fleet import servers as embedded
from dynaplan.planner.learnt_files import LearntOf, learnt_dir, write_file
from dynaplan.util.amounts import GIB
from dynaplan.util.errors import ConfigError, UserError

FINDINGS = (
    Finding(Level.OK, "port", "8000 is free"),
    Finding(Level.WARNING, "shared memory", "small", "Make it larger."),
    Finding(Level.FAULT, "etcd", "there is none", "Install one."),
)


def with_checks(monkeypatch: pytest.MonkeyPatch, *found: Finding) -> None:
    def check() -> Iterator[Finding]:
        yield from found

    monkeypatch.setattr(doctor, "CHECKS", (check,))


def test_no_line_is_wider_than_the_screen() -> None:
    found = (Finding(Level.NOTE, "topic", "many words " * 20, "and more words " * 20),)
    assert max(map(len, click.unstyle(page(found, 60)).splitlines())) <= 60


@pytest.mark.parametrize(("found", "code"), [(FINDINGS, 1), (FINDINGS[:2], 0)])
def test_the_exit_code_says_whether_serve_can_work(
    monkeypatch: pytest.MonkeyPatch, found: tuple[Finding, ...], code: int
) -> None:
    with_checks(monkeypatch, *found)
    assert CliRunner().invoke(command, [], standalone_mode=False).return_value == code


def test_json_has_every_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    with_checks(monkeypatch, *FINDINGS)
    rows = json.loads(CliRunner().invoke(command, ["--json"], standalone_mode=False).output)
    assert [row["level"] for row in rows] == ["ok", "warn", "FAIL"]


def levels(found: Any) -> dict[str, Level]:
    return {each.topic: each.level for each in found}


def test_every_check_finds_something_here_and_says_what_to_do_about_it() -> None:
    found = list(doctor.findings())
    assert {"dynaplan", "GPUs", "etcd", "NATS", "port", "memory", "open files"} <= {
        each.topic for each in found
    }
    assert [each for each in found if not each.says or (each.level is not Level.OK and not each.advice)] == []


def test_a_check_that_fails_is_a_finding_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("no")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.python))
    assert levels(doctor.findings()) == {"broken": Level.WARNING, "dynaplan": Level.OK}


def test_gpus_in_use_are_told_with_their_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_devices, "driver_version", lambda: ("570.1", ""))
    monkeypatch.setattr(gpu_devices, "available_gpus", lambda number: ((Gpu(0, "GPU-a", "H100"),), False))
    uses = {0: GpuUse(7 * 2**30, (GpuProcess(12, "python"),))}
    monkeypatch.setattr(gpu_devices, "uses_reader", lambda gpus: lambda: uses)
    found = list(doctor.gpus())
    assert levels(found) == {"GPUs": Level.OK, "GPU 0": Level.WARNING}
    assert found[1].says == "7.0 GiB in use by python (12)"


def test_devices_without_nvml_are_a_container_without_the_drivers_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_devices, "driver_version", lambda: ("", "no library"))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("/dev/nvidia0")]))
    assert levels(doctor.gpus()) == {"GPUs": Level.WARNING}


def test_a_missing_server_is_a_fault_unless_the_environment_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> Any:
        raise UserError("there is no server", hint="Install one.")

    monkeypatch.setattr(embedded, "find_etcd", missing)
    monkeypatch.setattr(embedded, "find_nats_server", missing)
    monkeypatch.setenv("NATS_SERVER", "nats://x")
    monkeypatch.delenv("ETCD_ENDPOINTS", raising=False)
    found = list(doctor.servers())
    assert levels(found) == {"etcd": Level.FAULT, "NATS": Level.OK}
    assert found[0].advice == "Install one. --store file needs no etcd."


def test_without_a_real_engine_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.Requirement, "find", lambda requirement: "")
    found = levels(doctor.engines())
    assert found["engines"] is Level.WARNING
    assert found["engine vllm"] is Level.NOTE


def test_a_port_that_is_taken_is_told_with_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployments, "port_holder", lambda port: "pid 7 (python)")
    assert levels(doctor.port()) == {"port": Level.WARNING}


def test_deployments_that_run_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SimpleNamespace(namespace="ns", frontend_url="http://x", arbiter=SimpleNamespace(pid=7))
    monkeypatch.setattr(deployments, "find_deployments", lambda: [one])
    assert next(doctor.deployments()).says == "ns runs at http://x (serve pid 7)"


@pytest.mark.parametrize(("free", "level"), [(1 << 20, Level.WARNING), (1 << 40, Level.OK)])
def test_little_shared_memory_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, level: Level
) -> None:
    monkeypatch.setenv("DYNAPLAN_MEMORY_DIR", str(tmp_path))
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=free, used=0)
    )
    assert levels(doctor.shared_memory()) == {"shared memory": level}


def test_shared_memory_that_is_not_there_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DYNAPLAN_MEMORY_DIR", str(tmp_path / "none"))
    assert levels(doctor.shared_memory()) == {"shared memory": Level.WARNING}


def test_low_limits_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    assert levels(doctor.limits()) == {"open files": Level.WARNING, "processes": Level.WARNING}


def test_a_directory_that_cannot_be_written_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("DYN_CIRCUS_LOG_DIR", str(tmp_path))
    found: list[Finding] = list(doctor.directories())
    assert {each.level for each in found} == {Level.FAULT}
    assert "DYN_LOCAL_STATE_DIR" in found[0].advice


def test_models_are_read_as_serve_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("Models: {ant: {engine: sim, memory: 50GiB}, bee: {engine: sim}}")
    found = doctor.read_model_needs(str(file), ["--Models.ant.memory=40GiB"], 1, 60 * GIB)
    assert next((each.model, each.bytes_each) for each in found.needs) == ("ant", 40 * GIB)
    assert [(each.index, each.total_bytes) for each in found.devices] == [(0, 60 * GIB)]
    assert found.unknown == {"bee"}
    file.write_text("Planner: {policy: sla}")
    with pytest.raises(ConfigError, match="no section Models"):
        doctor.read_model_needs(str(file), [], 1, 0)


def test_a_model_whose_steps_were_learnt_bears_so_many_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    line = StepLine(10.0, 1.0, 0.001, 0.1, 1.0)
    of = LearntOf("sim", "1", "ant-8b", "", {}, "a box", 1, "decode")
    write_file(learnt_dir({"HOME": str(tmp_path)}), of, LearntTiming(line, line, 0.04, largest_batch=16))
    file = tmp_path / "models.yaml"
    file.write_text("Models: {ant: {engine: sim, model: ant-8b, Planner: {policy: sla, itl: 30}}}")
    (found,) = (
        each
        for each in doctor.file_findings(str(file), [], 1, 0)
        if each.topic == "model ant" and "bears" in each.says
    )
    assert found.says.startswith("at ITL 30 ms it bears 10 at once")


def test_the_findings_about_models_come_below_those_about_the_box(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_checks(monkeypatch, FINDINGS[0])
    file = tmp_path / "models.yaml"
    file.write_text("Models: {ant: {engine: sim, memory: 50GiB}}")
    arguments = ["-f", str(file), "--gpus", "1", "--model-memory", "60GiB"]
    shown = CliRunner().invoke(command, arguments, standalone_mode=False).output.splitlines()
    assert [line.split()[1] for line in shown[:2]] == ["port", "models"]
