"""aiperf as the load generator: what it is told, and what its records are read as."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from dynaplan.lab.profiling.load import programs
from dynaplan.lab.profiling.load.aiperf import Aiperf, answer_of
from dynaplan.lab.profiling.load.completions import CompletionClient
from dynaplan.lab.profiling.load.load_generator import aiperf_program
from dynaplan.lab.profiling.load.meters import measure_prefill
from dynaplan.lab.profiling.load.prompts import PromptMaker
from dynaplan.lab.profiling.loads import DecodeLoad
from dynaplan.util.errors import ConfigError, PermanentError
from tests.fakes import aiperf as fake
from tests.fakes.polling import eventually

PROMPTS = [PromptMaker(1).prompt(number, 5 + number) for number in range(3)]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake is the program ``aiperf`` on PATH; its calls have their files below."""
    program = tmp_path / "aiperf"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {fake.__file__} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr("tempfile.tempdir", str(scratch_of(tmp_path)))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "files"


def scratch_of(tmp_path: Path) -> Path:
    """Where temporary directories are made."""
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    return scratch


def generator(directory: Path) -> Aiperf:
    return Aiperf(aiperf_program("aiperf"), CompletionClient("http://127.0.0.1:1", "m"), directory)


async def test_answers_come_in_the_order_of_the_prompts_with_the_time_of_every_piece(directory: Path) -> None:
    answers = await generator(directory).answers(PROMPTS, 4, concurrency=3)
    assert [answer.prompt_tokens for answer in answers] == [5, 6, 7]
    first = answers[0]
    since_sent_ms = [1000 * (each - first.sent_s) for each in first.event_times_s]
    assert since_sent_ms == pytest.approx([100.0, 120.0, 140.0, 160.0], abs=0.01)
    assert (first.ttft_ms, first.tokens_per_event) == (pytest.approx(100.0, abs=0.01), 1.0)
    assert list(scratch_of(directory.parent).iterdir()) == [], "what aiperf leaves behind is gone"


async def test_a_ttft_needs_one_start_of_aiperf(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aiperf, starts = generator(directory), []
    run = aiperf.answers

    async def counted(prompts: list[list[int]], output_tokens: int, concurrency: int) -> list:
        starts.append(concurrency)
        return await run(prompts, output_tokens, concurrency)

    monkeypatch.setattr(aiperf, "answers", counted)
    measurement = await measure_prefill(aiperf, DecodeLoad(100, 5, 1))
    assert measurement.ttft_ms == pytest.approx(fake.TTFT_MS, abs=0.01)
    assert starts == [1]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("refused", "answered 404: The model does not exist"),
        ("fails", "exit code 1"),
        ("forgets", "2 records of 3 requests"),
    ],
)
async def test_what_aiperf_did_not_measure_is_an_error_that_says_why(
    directory: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, why: str
) -> None:
    monkeypatch.setenv("FAKE_AIPERF", wrong)
    with pytest.raises(PermanentError, match=why) as caught:
        await generator(directory).answers(PROMPTS, 4, concurrency=3)
    if wrong == "fails":
        assert "out of memory" in str(caught.value.hint), "the end of its log"


async def test_records_of_an_earlier_call_are_never_taken_for_the_answers(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await generator(directory).answers(PROMPTS, 4, concurrency=3)
    records = directory / "profile_export.jsonl"
    monkeypatch.setattr(programs.asyncio, "create_subprocess_exec", _nobody)
    with pytest.raises(PermanentError):
        await generator(directory).answers(PROMPTS, 4, concurrency=3)
    assert not records.exists()


async def _nobody(*_: object, **__: object) -> None:
    raise OSError("no such program")


async def test_an_interruption_leaves_no_process_of_aiperf(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_AIPERF", "hangs")
    pid_file = directory / "service.pid"
    task = asyncio.create_task(generator(directory).answers(PROMPTS, 4, concurrency=3))
    await eventually(lambda: pid_file.exists() and pid_file.read_text() != "", 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: not _runs(int(pid_file.read_text())), 10)


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_time_in_another_unit_is_no_answer() -> None:
    record = fake.record(0, {"max_tokens": 2, "prompt": [1]})
    record["metrics"]["time_to_first_token"]["unit"] = "sec"
    with pytest.raises(ValueError, match="sec"):
        answer_of(record)


def test_aiperf_must_be_asked_for_and_be_there(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    assert aiperf_program("own") == ""
    assert aiperf_program("auto") == str(directory.parent / "aiperf")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(programs.sys, "executable", "/nowhere/python")
    assert aiperf_program("auto") == ""
    with pytest.raises(ConfigError, match="no program aiperf") as missing:
        aiperf_program("aiperf")
    assert "pipx install aiperf" in str(missing.value.hint)
