"""What a worker process makes of its end: the exit code, by which it is started again or not."""

from __future__ import annotations

import pytest

from dynaplan.graph.lifecycle import EXIT_CANNOT_START, EXIT_PROGRAM_ENDED
from dynaplan.util.errors import (
    ConfigError,
    DeploymentError,
    GraphError,
    ProgramEnded,
    StoreUnavailable,
    TemporaryError,
    WorkerStartFailed,
)
from dynaplan.worker import main as child
from dynaplan.worker.worker_runtime import EXIT_CRASHED

ARGUMENTS = ("graphs.agg:Frontend", "--service-name", "VllmWorker")


@pytest.fixture(autouse=True)
def its_own_process_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_prepare_process", lambda _: None)


def exit_code_of(error: Exception, monkeypatch: pytest.MonkeyPatch) -> int:
    async def run(*_: object) -> int:
        raise error

    monkeypatch.setattr(child, "_run_worker", run)
    return child.main(ARGUMENTS)


@pytest.mark.parametrize("error", [ConfigError("x"), GraphError("x"), WorkerStartFailed("x")])
def test_what_a_restart_cannot_mend_ends_the_worker_for_good(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(error, monkeypatch) == EXIT_CANNOT_START
    assert "can never start: x" in capfd.readouterr().err


@pytest.mark.parametrize("error", [TemporaryError("x"), StoreUnavailable("x"), ValueError("x")])
def test_what_a_restart_may_mend_is_a_crash(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_code_of(error, monkeypatch) == EXIT_CRASHED


def test_a_command_that_ended_before_it_answered_has_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert exit_code_of(ProgramEnded("x"), monkeypatch) == EXIT_PROGRAM_ENDED


def test_a_machine_that_has_no_free_port_now_is_no_reason_never_to_start(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(DeploymentError("no 2 free ports"), monkeypatch) == EXIT_CRASHED
    assert "cannot start now: no 2 free ports" in capfd.readouterr().err


def test_wrong_arguments_end_the_worker_for_good() -> None:
    assert child.main(("graphs.agg:Frontend",)) == EXIT_CANNOT_START
