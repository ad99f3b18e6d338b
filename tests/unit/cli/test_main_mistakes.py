"""Mistakes of a new user's first ten minutes: the cause, what to do next, and the nearest name.

The numbers are those of the list of mistakes that users made; the others of it stand where their code is.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dynaplan.cli.main import group
from dynaplan.util.errors import DynaplanError

DISAGG = ("serve", "graphs.disagg:Frontend", "-f", "disagg.yaml", "--dry-run")
AGG = ("serve", "graphs.agg:Frontend", "-f", "agg.yaml", "--dry-run", "--gpus", "8")


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("DYNAPLAN_NODE_DIR", "DYN_LOCAL_STATE_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("ETCD_ENDPOINTS", "NATS_SERVER", "DYN_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "list.yaml").write_text("VllmWorker:\n  - engine: sim\n")
    (tmp_path / "tow.yaml").write_text("VlmWorker:\n  engine: sim\n")
    return tmp_path


def answer(*typed: str) -> str:
    """The message and its hint, as the user reads them."""
    result = CliRunner().invoke(group, typed)
    assert result.exit_code
    error = result.exception
    assert isinstance(error, DynaplanError | SystemExit), result
    return result.output + (
        f"{error}\n{getattr(error, 'hint', '')}" if isinstance(error, DynaplanError) else ""
    )


@pytest.mark.parametrize(
    ("number", "typed", "words"),
    [
        (1, ("serve", "graphs.disag:Frontend"), ["graphs.disag", "Did you mean 'graphs.disagg'?"]),
        (2, ("serve", "graphs.disagg:Fronted"), ["Fronted", "Did you mean 'Frontend'?"]),
        (3, (*DISAGG[:2], "-f", "disag.yaml"), ["no such file in", "Did you mean 'disagg.yaml'?"]),
        (7, (*DISAGG[:2], "--config", "f.yaml"), ["--config", "Did you mean", "'--config-file'"]),
        (8, (*AGG, "--VllmWorker.max-num-seq=3"), ["max-num-seq", "Did you mean 'max-num-seqs'?"]),
        (9, (*AGG[:2], "-f", "tow.yaml"), ["VlmWorker", "Did you mean 'VllmWorker'?"]),
        (10, (*AGG, "--VllmWorker.engine=vlm"), ["'vlm'", "Did you mean 'vllm'?", "llamacpp"]),
        (11, (*DISAGG, "--Planner.adjustment-interval=ten"), ["'ten'", "expected a number, more than 0"]),
        (13, (*AGG[:2], "-f", "list.yaml"), ["list.yaml", "Write sections such as"]),
        (17, (*AGG, "--Common.engine=vllm", "--Common.model=a/b"), ["pip install 'vllm'", "vllm-command"]),
        (22, (*AGG, "--VllmWorker.ServiceArgs.workers=9"), ["9 x 1", "8 visible", "Lower"]),
        (24, ("status", "--namespace", "tow"), ["no deployment tow"]),
        (25, ("status",), ["no deployment is running", "dynaplan serve", "DYN_LOCAL_STATE_DIR"]),
        (
            37,
            (*DISAGG, "--Planner.policy=sla"),
            ["profile", "`dynaplan profile-sla` measures one", "policy: load"],
        ),
        (41, ("simulate", "--trace", "sinusoid:", "--policy", "sal"), ["sal", "Did you mean 'sla'?"]),
        (41, ("simulate", "--trace", "sinus:"), ["sinus", "Did you mean 'sinusoid'?"]),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_what_is_wrong_and_what_to_do_is_said(number: int, typed: tuple[str, ...], words: list[str]) -> None:
    text = answer(*typed)
    assert [word for word in words if word not in text] == [], text


def test_20_a_state_directory_that_cannot_be_written_is_named_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "file" / "state"))
    text = answer(*AGG[:4], "--port", "0")
    assert str(tmp_path / "file") in text
    assert "DYN_LOCAL_STATE_DIR" in text
