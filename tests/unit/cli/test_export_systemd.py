"""``dynaplan export systemd``: a unit that systemd reads back as it was meant."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dynaplan.cli.export import systemd
from dynaplan.graph.lifecycle import EXIT_CANNOT_START
from dynaplan.util.errors import ConfigError


def run(*arguments: str) -> Any:
    return CliRunner().invoke(systemd, arguments, standalone_mode=False)


def unit(*arguments: str) -> dict[str, list[str]]:
    """The settings of a unit by their names."""
    result = run(*arguments)
    assert result.exception is None, result.exception
    settings: dict[str, list[str]] = {}
    for line in result.output.splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def test_a_unit_runs_serve_with_its_options_and_gets_the_time_to_drain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = unit("graphs.agg:Frontend", "-f", "agg.yaml", "--drain-timeout", "90.5", "--VllmWorker.a=b")
    assert settings["ExecStart"][0].endswith(
        "-m dynaplan serve graphs.agg:Frontend -f agg.yaml --drain-timeout 90.5 --VllmWorker.a=b "
        "--exit-on-failure"
    )
    assert settings["TimeoutStopSec"] == ["106"]
    assert settings["WorkingDirectory"] == [str(tmp_path)]
    assert (settings["Type"], settings["KillMode"]) == (["notify"], ["mixed"])
    assert settings["WantedBy"] == ["default.target"]
    assert settings["RestartPreventExitStatus"] == [f"2 {EXIT_CANNOT_START}"]
    assert not {"User", "Wants", "After"} & settings.keys()


def test_a_unit_with_a_supervisor_hears_serve_below_it() -> None:
    assert unit("graphs.agg:Frontend")["NotifyAccess"] == ["all"]
    assert unit("graphs.agg:Frontend", "--no-supervise")["NotifyAccess"] == ["main"]
    assert unit("graphs.agg:Frontend", "--orphan-grace", "0")["NotifyAccess"] == ["main"]


def test_a_unit_of_the_system_runs_as_a_user() -> None:
    settings = unit("graphs.agg:Frontend", "--system", "--user", "llm", "--namespace", "two")
    assert (settings["User"], settings["WantedBy"]) == (["llm"], ["multi-user.target"])
    assert settings["EnvironmentFile"] == ["-/etc/dynaplan/two.env"]
    assert settings["After"] == ["network-online.target nvidia-persistenced.service"]


def test_the_shells_variables_are_in_it_but_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", "/a b/100%")
    monkeypatch.setenv("DYNAPLAN_API_KEY", "secret")
    result = run("graphs.agg:Frontend")
    assert 'Environment="DYN_LOCAL_STATE_DIR=/a b/100%%"' in result.output
    assert "=secret" not in result.output


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NATS_SERVER", "nats://llm:pw-1@host:4222", "NATS_AUTH_PASSWORD"),
        ("ETCD_ENDPOINTS", "http://one:2379,http://llm:pw-1@two:2379", "ETCD_AUTH_PASSWORD"),
        ("DYN_DEPLOYMENT_CONFIG", '{"Common": {"hf-token": "pw-1"}}', "DYN_DEPLOYMENT_CONFIG=..."),
        ("DYN_DEPLOYMENT_CONFIG", "{Common: {hf-token: pw-1}}", "DYN_DEPLOYMENT_CONFIG=..."),
    ],
)
def test_a_variable_with_a_secret_in_its_value_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    result = run("graphs.agg:Frontend")
    assert isinstance(result.exception, ConfigError)
    assert f"{name} holds a secret" in str(result.exception)
    assert said in str(result.exception)
    assert "pw-1" not in result.output + str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--api-key", "k"), "--api-key would stand in the unit"),
        (("--api-key=k",), "--api-key would stand in the unit"),
        (("--Common.hf-token=pw-1",), "--Common.hf-token holds a secret"),
        (("--Common.hf-token", "pw-1"), "--Common.hf-token holds a secret"),
        (("--Common.proxy=http://me:pw-1@host",), "--Common.proxy holds a secret"),
        (("--detach",), "--detach is nothing for a unit"),
        (("--dry-run",), "--dry-run is nothing for a unit"),
        (("--user", "x"), "--user x is for --system"),
        (("--VllmWorker.a=b\nc",), "cannot stand in a unit"),
    ],
)
def test_what_cannot_be_in_a_unit_is_refused(arguments: tuple[str, ...], said: str) -> None:
    error = run("graphs.agg:Frontend", *arguments).exception
    assert isinstance(error, ConfigError)
    assert said in str(error)
    assert "pw-1" not in str(error)


def test_a_number_of_tokens_is_no_secret() -> None:
    option = "--VllmWorker.long-prefill-token-threshold=2048"
    result = run("graphs.agg:Frontend", option)
    assert result.exception is None
    assert option in result.output


def test_an_option_that_serve_does_not_know_is_refused_as_there() -> None:
    assert "No such option '--prot'" in str(run("graphs.agg:Frontend", "--prot", "1").exception)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs Debian's systemd for its verifier")
@pytest.mark.parametrize("kind", [(), ("--system", "--user", "root")])
def test_systemds_own_verifier_takes_the_unit(
    kind: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / 'a "b" $c %d'
    place.mkdir()
    monkeypatch.chdir(place)
    path = tmp_path / "dynaplan-dynamo.service"
    result = run("graphs.agg:Frontend", '--VllmWorker.text=$HOME "q" \\ 5%', *kind, "-o", str(path))
    assert result.exception is None, result.exception
    manager = "--system" if kind else "--user"
    # Units of this machine and their faults are not the test's: it has the ones that ours refers to.
    for name in ("sysinit", "basic", "shutdown", "network-online", "default", "multi-user"):
        (tmp_path / f"{name}.target").write_text("[Unit]\n")
    verified = subprocess.run(
        ["systemd-analyze", manager, "--man=no", "--generators=no", "verify", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
        | {"SYSTEMD_UNIT_PATH": str(tmp_path)},
    )
    assert verified.stderr.strip() == ""
    assert verified.returncode == 0
