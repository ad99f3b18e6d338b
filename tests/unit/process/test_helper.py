"""A helper answers in order, within its bounds, and is gone when it should be. The module is a script."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

import dynaplan
from dynaplan.process.helper import (
    HelperFailed,
    HelperLimits,
    HelperProcess,
    HelperTimeout,
    helper_environment,
)
from dynaplan.process.process_table import identify
from tests.fakes.polling import eventually, wait_until
from tests.fakes.processes import freeze

SCRIPT = """
import os, subprocess, sys, time
from dynaplan.process.helper_main import become_helper
channel, own = become_helper(sys.argv[1:])
print("what a library prints", flush=True)
for question, payload in channel:
    what = question.get("do")
    if what == "end": os._exit(7)
    if what == "hang": time.sleep(600)
    if what == "family": subprocess.Popen(["sleep", "600"]); time.sleep(600)
    if what == "fill": payload = b"x" * (1 << 30)
    if what == "garbage": os.write(channel._answers.fileno(), b"{" * 64); time.sleep(600)
    channel.answer({"pid": os.getpid(), "own": own, **question}, payload[::-1])
"""

Make = Callable[..., HelperProcess]


def test_it_answers_and_is_killed_with_its_family_on_uvloop_as_on_asyncios_loop(tmp_path: Path) -> None:
    (tmp_path / "answers.py").write_text(SCRIPT)
    environment = helper_environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"

    async def ask() -> None:
        helper = HelperProcess("answers", (), HelperLimits(4.0), environment, subprocess.DEVNULL)
        try:
            document, payload = await helper.ask({}, b"ab")
            assert payload == b"ba"
            with pytest.raises(HelperTimeout):
                await helper.ask({"do": "family"})
            await eventually(lambda: not psutil.pid_exists(document["pid"]))
        finally:
            await helper.close()

    uvloop.run(ask())


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes helpers of the script; they are closed at the end."""
    (tmp_path / "answers.py").write_text(SCRIPT)
    made: list[HelperProcess] = []

    def helper(answer_s: float = 60.0, **limits: Any) -> HelperProcess:
        environment = helper_environment()
        environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
        limits_of_all = HelperLimits(answer_s, **limits)
        made.append(HelperProcess("answers", ("a", "b"), limits_of_all, environment, subprocess.DEVNULL))
        return made[-1]

    yield helper
    for each in made:
        await each.close()
    assert not psutil.Process().children()


async def pid_of(helper: HelperProcess) -> int:
    return int((await helper.ask({}))[0]["pid"])


async def test_questions_are_answered_in_their_order_with_objects_and_bytes_of_any_size(make: Make) -> None:
    helper = make()
    asked = [helper.ask({"number": number}, bytes([number]) * number * 200_000) for number in range(4)]
    for number, (document, payload) in enumerate(await asyncio.gather(*asked)):
        assert (document["number"], document["own"]) == (number, ["a", "b"])
        assert payload == bytes([number]) * number * 200_000


async def test_one_that_ends_fails_all_who_wait_and_the_next_question_starts_another(make: Make) -> None:
    helper = make()
    first = await pid_of(helper)
    failed = await asyncio.gather(helper.ask({"do": "end"}), helper.ask({}), return_exceptions=True)
    assert [str(each) for each in failed] == ["its process ended with 7"] * 2
    assert await pid_of(helper) != first


async def test_one_that_is_too_slow_is_killed_with_what_it_has_started(make: Make) -> None:
    helper = make(answer_s=60.0)  # its start is not what is measured
    pid = await pid_of(helper)
    helper._limits = replace(helper._limits, answer_s=3.0)
    asked = asyncio.create_task(helper.ask({"do": "family"}))
    below = await eventually(lambda: psutil.Process(pid).children())
    with pytest.raises(HelperTimeout, match="not answered for 3 s"):
        await asked
    await eventually(lambda: not any(identify(each.pid) for each in below))
    assert not psutil.pid_exists(pid)


async def test_the_time_of_a_question_begins_when_it_is_its_turn(make: Make) -> None:
    helper = make(answer_s=60.0)
    pid = await pid_of(helper)
    psutil.Process(pid).suspend()
    asked = [asyncio.create_task(helper.ask({})) for _ in range(3)]
    await eventually(lambda: len(helper._waiting) == 3)
    assert helper._timer
    before_s = helper._timer.when()
    psutil.Process(pid).resume()
    await asyncio.gather(*asked)
    assert helper._timer.when() > before_s


async def test_memory_is_bounded(make: Make) -> None:
    helper = make(memory_bytes=1 << 29)
    with pytest.raises(HelperFailed, match="ended with 1"):
        await helper.ask({"do": "fill"})


async def test_an_idle_helper_is_ended_and_started_again(make: Make) -> None:
    helper = make(idle_s=0.05)
    first = await pid_of(helper)
    await eventually(lambda: not psutil.pid_exists(first))
    assert await pid_of(helper) != first


async def test_after_an_end_there_is_a_pause_that_grows_until_it_answers_again(make: Make) -> None:
    helper = make(restart_s=(0.0, 600.0))
    for _ in range(2):
        assert helper.can_be_asked
        await pid_of(helper)  # an answer begins the pauses anew
        with pytest.raises(HelperFailed):
            await helper.ask({"do": "end"})
    with pytest.raises(HelperFailed, match="with 7"):
        await helper.ask({"do": "end"})
    assert not helper.can_be_asked
    with pytest.raises(HelperFailed, match="its process has ended"):
        await helper.ask({})


def test_a_question_for_which_the_pipe_has_closed_fails_on_uvloop_as_on_asyncios_loop(tmp_path: Path) -> None:
    (tmp_path / "answers.py").write_text(SCRIPT)
    environment = helper_environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"

    async def ask() -> None:
        helper = HelperProcess("answers", (), HelperLimits(60.0), environment, subprocess.DEVNULL)
        try:
            pid = await pid_of(helper)
            freeze(pid)
            # A loop closes it when it notes the end, which it tells a moment later.
            helper._process.stdin.close()  # type: ignore[union-attr]
            for _ in range(3):
                await asyncio.sleep(0)
            asked = asyncio.create_task(helper.ask({}))
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(HelperFailed):
                await asked
        finally:
            await helper.close()

    for run in (uvloop.run, asyncio.run):
        run(ask())


async def test_a_question_that_is_given_up_half_written_ends_the_helper_and_holds_up_nobody(
    make: Make,
) -> None:
    helper = make()
    pid = await pid_of(helper)
    psutil.Process(pid).suspend()
    asked = asyncio.create_task(helper.ask({}, bytes(8 << 20)))
    await eventually(lambda: helper._waiting)
    asked.cancel()
    assert await pid_of(helper) != pid


async def test_one_that_was_given_up_when_it_was_written_is_answered_to_nobody(make: Make) -> None:
    helper = make()
    pid = await pid_of(helper)
    psutil.Process(pid).suspend()
    asked = asyncio.create_task(helper.ask({}))
    await eventually(lambda: helper._waiting and not helper._writing.locked())
    asked.cancel()
    psutil.Process(pid).resume()
    assert (await helper.ask({"number": 2}))[0] == {"pid": pid, "own": ["a", "b"], "number": 2}


async def test_one_that_is_being_ended_is_the_only_one_until_it_is_gone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = make()
    await pid_of(helper)
    going, is_gone = helper._process, asyncio.Event()
    assert going
    wait = going.wait

    async def wait_longer() -> int:
        await is_gone.wait()
        return await wait()

    monkeypatch.setattr(going, "wait", wait_longer)
    ending = asyncio.create_task(helper.end())
    asked = asyncio.create_task(helper.ask({}))
    await asyncio.sleep(0)
    assert helper.pid == 0
    is_gone.set()
    assert (await asked)[0]["pid"] != going.pid
    await ending


async def test_an_answer_that_cannot_be_read_ends_it(make: Make) -> None:
    with pytest.raises(HelperFailed, match="cannot be read"):
        await make().ask({"do": "garbage"})


async def test_a_closed_one_is_gone_and_answers_nobody(make: Make) -> None:
    helper = make()
    pid = await pid_of(helper)
    asked = asyncio.create_task(helper.ask({"do": "hang"}))
    await eventually(lambda: helper._waiting)
    await helper.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(HelperFailed, match="was ended"):
        await asked
    with pytest.raises(HelperFailed):
        await helper.ask({})


async def test_the_end_goes_on_though_the_one_who_waits_for_it_is_cancelled(make: Make) -> None:
    helper = make()
    pid = await pid_of(helper)
    ending = asyncio.create_task(helper.end())
    await asyncio.sleep(0)
    ending.cancel()
    await eventually(lambda: not psutil.pid_exists(pid))


async def test_a_helper_that_ended_before_it_was_killed_is_noted_without_a_complaint(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    helper = make()
    pid = await pid_of(helper)
    os.kill(pid, signal.SIGKILL)
    # The loop does not run meanwhile, so it cannot note the end.
    wait_until(lambda: identify(pid) is None)
    await helper.end()
    assert not caplog.records


def test_a_helper_dies_with_the_process_that_asks(tmp_path: Path) -> None:
    (tmp_path / "answers.py").write_text(SCRIPT)
    environment = helper_environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    words = [sys.executable, "-c", ASKER]
    asker = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert asker.stdout
    pid = int(asker.stdout.readline())
    asker.kill()
    asker.communicate()
    wait_until(lambda: identify(pid) is None)


ASKER = """
import asyncio, time
from dynaplan.process.helper import HelperLimits, HelperProcess
async def main():
    helper = HelperProcess("answers", (), HelperLimits(60.0))
    print((await helper.ask({}))[0]["pid"], flush=True)
    await helper.ask({"do": "hang"})
asyncio.run(main())
"""


def test_a_helper_gets_pythons_variables_and_no_secret() -> None:
    environ = {"PYTHONHASHSEED": "0", "COVERAGE_PROCESS_START": "x", "DYNAPLAN_API_KEY": "s", "PATH": "/bin"}
    environment = helper_environment(environ)
    home = str(Path(dynaplan.__file__).resolve().parents[1])
    assert environment == {"PYTHONHASHSEED": "0", "COVERAGE_PROCESS_START": "x", "PYTHONPATH": home}


def test_a_path_of_the_parent_comes_first() -> None:
    assert helper_environment({"PYTHONPATH": "/own"})["PYTHONPATH"].startswith("/own:")
