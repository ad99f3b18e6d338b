"""Exports of deployments that run here; promtool, where there is one, checks the file for Prometheus."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynaplan.cli import main
from dynaplan.config.settings.servers import CA_VARIABLE
from dynaplan.fleet.launch import LAUNCH_FILE, RELOADED_FILE, Reload
from dynaplan.fleet.prometheus_targets import TARGETS_FILE, prometheus_targets
from dynaplan.fleet.runtime_dir import CLIENTS_FILE
from dynaplan.process.process_table import identity_of
from tests.fakes.promlint import promtool
from tests.unit.fleet.test_launch import LAUNCH

Running = Callable[..., Path]


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    """Write what is there of a deployment whose ``serve`` is this process; its directory of logs."""
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path / "node"))
    monkeypatch.delenv("DYN_NAMESPACE", raising=False)
    (tmp_path / "state").mkdir(mode=0o700)

    def run(namespace: str, **environment: str) -> Path:
        runtime_dir, log_dir = tmp_path / f"{namespace}.run", tmp_path / "logs [old]" / namespace
        runtime_dir.mkdir()
        log_dir.mkdir(parents=True)
        (runtime_dir / CLIENTS_FILE).write_text(json.dumps(environment))
        document = {
            "namespace": namespace,
            "circus_endpoint": "ipc:///none",
            "components": {},
            "arbiter": asdict(identity_of(os.getpid())),
            "addresses": {
                "frontend_url": "http://127.0.0.1:8000",
                "runtime_dir": str(runtime_dir),
                "log_dir": str(log_dir),
            },
        }
        (tmp_path / "state" / f"{namespace}.json").write_text(json.dumps(document))
        return log_dir

    return run


def export(*arguments: str, target: str = "prometheus") -> int:
    with pytest.raises(SystemExit) as ended:
        main(["export", target, *arguments])
    return int(str(ended.value.code))


def jobs(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(text)["scrape_configs"]
    return found


def test_the_server_finds_the_targets_by_the_file_that_serve_keeps(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_dir = running("dynamo")
    config = tmp_path / "prometheus.yml"
    with prometheus_targets(log_dir, "http://127.0.0.1:8000"):
        assert export("-o", str(config)) == 0
        code, told = promtool("check", "config", str(config))
    assert (code, [line for line in told if "WARNING" in line or "FAILED" in line]) == (0, [])
    assert capsys.readouterr().err == f"{config} is written.\n"
    (job,) = jobs(config.read_text())
    assert (job["job_name"], job["metrics_path"]) == ("dynaplan-dynamo", "/metrics/all")
    (pattern,) = job["file_sd_configs"][0]["files"]
    assert pattern == str(log_dir / TARGETS_FILE).replace("[", "\\[")
    assert "tls_config" not in job


def test_each_deployment_that_runs_is_a_job_with_its_own_authority(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    running("dynamo")
    running("two", **{CA_VARIABLE: "/etc/ca.pem"})
    assert export() == 0
    found = {job["job_name"]: job.get("tls_config") for job in jobs(capsys.readouterr().out)}
    assert found == {"dynaplan-dynamo": None, "dynaplan-two": {"ca_file": "/etc/ca.pem"}}
    assert export("--namespace", "two") == 0
    assert [job["job_name"] for job in jobs(capsys.readouterr().out)] == ["dynaplan-two"]


def test_a_place_that_cannot_be_written_is_named(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running("dynamo")
    assert export("-o", str(tmp_path / "gone" / "prometheus.yml")) == 2
    assert "gone/prometheus.yml: No such file or directory" in capsys.readouterr().err


def test_without_a_deployment_the_way_out_is_told(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export() == 2
    assert "no deployment is running here" in capsys.readouterr().err


def test_without_a_graph_a_unit_is_offered_the_ones_that_run(
    running: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert export(target="systemd") == 2
    answer = capsys.readouterr().err
    assert "Write `dynaplan export systemd GRAPH`" in answer
    assert "runs here" not in answer
    running("two")
    launch = replace(LAUNCH, config_file="/some where/disagg.yaml")
    (tmp_path / "two.run" / LAUNCH_FILE).write_text(launch.to_json())
    assert export(target="systemd") == 2
    answer = capsys.readouterr().err
    assert "two, which runs here" in answer
    assert (
        "cd '/some where' && dynaplan export systemd graphs.disagg:Frontend -f '/some where/disagg.yaml' "
        "--namespace two --port 8000" in answer
    )


def test_manifests_have_the_settings_of_the_last_reload(
    running: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    running("ns")
    (tmp_path / "ns.run" / LAUNCH_FILE).write_text(LAUNCH.to_json())
    reload = Reload({"VllmWorker": {"model": "newest"}})
    (tmp_path / "ns.run" / RELOADED_FILE).write_text(reload.to_json())
    assert export("--image", "i:1", "--VllmWorker.max-num-seqs=7", target="kubernetes") == 0
    found = {each["metadata"]["name"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}
    section = yaml.safe_load(found["ns-graph"]["data"]["graph.yaml"])["VllmWorker"]
    assert (section["model"], section["max-num-seqs"]) == ("newest", 7)
    decode = found["ns-decode"]
    assert decode["spec"]["replicas"] == 0
