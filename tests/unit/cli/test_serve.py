"""``dynaplan serve`` before anything starts: what it warns of, and what it is about to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dynaplan.cli.main import group, main
from dynaplan.fleet.serve import ServeOptions

WITHOUT_KEY = "without an API key"


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path))
    for name in ("DYNAPLAN_API_KEY", "DYNAMO_HOST", "DYNAMO_PORT"):
        monkeypatch.delenv(name, raising=False)


def dry_run(*arguments: str) -> str:
    command = ["serve", "graphs.agg:Frontend", "-f", "agg.yaml", "--dry-run", "--gpus", "2", *arguments]
    result = CliRunner().invoke(group, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("arguments", [["--host", "0.0.0.0"], ["--host", "::"], ["--Frontend.host=10.0.0.1"]])
def test_an_address_that_others_reach_without_a_key_is_warned_of(arguments: list[str]) -> None:
    text = dry_run(*arguments)
    assert f"Warning: --host {arguments[-1].rpartition('=')[2]} {WITHOUT_KEY}" in text
    assert "DYNAPLAN_API_KEY" in text


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--host", "localhost"],
        ["--host", "LOCALHOST"],
        ["--host", "127.1"],
        ["--host", "127.0.0.2"],
        ["--host", "::1"],
        ["--host", "0.0.0.0", "--api-key", "secret"],
        ["--host", "0.0.0.0", "--Frontend.api-key=secret"],
    ],
    ids=" ".join,
)
def test_no_other_address_is(arguments: list[str]) -> None:
    assert WITHOUT_KEY not in dry_run(*arguments)


@pytest.mark.parametrize(
    ("arguments", "port"),
    [([], 8000), (["--Frontend.port=0"], 0), (["--Frontend.port=9"], 9), (["--Frontend.port=9", "-p0"], 0)],
    ids=str,
)
def test_port_0_of_the_file_asks_the_kernel_for_one_as_on_the_command_line(
    arguments: list[str], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ServeOptions] = []
    monkeypatch.setattr(
        "dynaplan.fleet.serve.serve", lambda spec, config, options, link: served.append(options) or 0
    )
    command = ["serve", "graphs.agg:Frontend", "-f", "agg.yaml", "--gpus", "2", *arguments]
    CliRunner().invoke(group, command, catch_exceptions=False)
    assert [each.port for each in served] == [port]


@pytest.mark.parametrize(("gpus", "frontends"), [(2, 1), (8, 4)])
def test_automatic_frontends_are_a_number_before_anything_starts(
    gpus: int, frontends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    text = dry_run("--Frontend.ServiceArgs.workers=auto", "--gpus", str(gpus), "--show-env")
    assert f'"ServiceArgs": {{"workers": {frontends}}}' in text
    assert '"auto"' not in text


@pytest.mark.parametrize(
    ("options", "is_program", "is_held"),
    [
        ([], True, True),
        (["--no-supervise"], True, False),
        (["--orphan-grace", "0"], True, False),
        (["--dry-run"], True, False),
        ([], False, False),
    ],
)
def test_serve_gets_a_supervisor_where_the_command_line_is_all_that_the_process_does(
    options: list[str], is_program: bool, is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grace_s: list[float] = []
    monkeypatch.setattr("dynaplan.fleet.serve.serve", lambda spec, config, options, link: 0)
    monkeypatch.setattr(
        "dynaplan.cli.serve.run_under_supervisor",
        lambda arguments, grace, drain, namespace: grace_s.append(grace) or (None, None),
    )
    words = ["serve", "graphs.agg:Frontend", "-f", "agg.yaml", "--gpus", "2", *options]
    monkeypatch.setattr("sys.argv", ["dynaplan", *words])
    with pytest.raises(SystemExit) as ended:
        main(None if is_program else words)
    assert ended.value.code == 0
    assert grace_s == ([120.0] if is_held else [])
