"""A helper's environment: Python's own variables, and where this dynaplan lies; its end is noted."""

import asyncio
import signal
import sys
from asyncio.subprocess import DEVNULL
from pathlib import Path

import psutil
import pytest

import dynaplan
from dynaplan.process.helper_process import end_helper, helper_environment, kill_helper
from tests.fakes.polling import eventually, wait_until


def test_a_helper_gets_pythons_variables_and_no_secret() -> None:
    environ = {"PYTHONHASHSEED": "0", "COVERAGE_PROCESS_START": "x", "DYNAPLAN_API_KEY": "s", "PATH": "/bin"}
    environment = helper_environment(environ)
    home = str(Path(dynaplan.__file__).resolve().parents[1])
    assert environment == {"PYTHONHASHSEED": "0", "COVERAGE_PROCESS_START": "x", "PYTHONPATH": home}


def test_a_path_of_the_parent_comes_first() -> None:
    assert helper_environment({"PYTHONPATH": "/own"})["PYTHONPATH"].startswith("/own:")


async def helper(code: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", code, stdin=DEVNULL)


async def test_the_exit_status_of_a_helper_that_ended_before_it_was_killed_is_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = await helper("raise SystemExit(3)")
    # The loop does not run meanwhile, so it cannot note the end.
    wait_until(lambda: not psutil.pid_exists(process.pid) or psutil.Process(process.pid).status() == "zombie")
    await end_helper(process)
    assert process.returncode == 3
    assert not caplog.records
    kill_helper(process)


async def test_a_helper_is_waited_for_though_its_end_is_cancelled() -> None:
    process = await helper("import time; time.sleep(60)")
    ending = asyncio.create_task(end_helper(process))
    await asyncio.sleep(0)
    ending.cancel()
    await eventually(lambda: process.returncode is not None)
    assert process.returncode == -signal.SIGKILL
