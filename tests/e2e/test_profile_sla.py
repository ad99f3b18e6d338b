"""``dynaplan profile-sla`` as a user runs it: a known answer, an interruption, and what cannot work."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynaplan.engines.timing_model.step_timing import MeasuredProfile
from tests.e2e.deployment import REPOSITORY, dynaplan
from tests.e2e.traces import in_torture
from tests.fakes.polling import wait_until
from tests.fakes.tiny_models import tiny_gguf

KNOWN: dict[str, Any] = {
    "prefill_isl": [100, 500, 1000],
    "prefill_ttft": [100.0, 150.0, 250.0],
    "prefill_thpt_per_gpu": [1000.0, 3333.0, 4000.0],
    "x_kv_usage": [0.01, 0.5, 1.0, 0.05, 0.5, 1.0],
    "y_context_length": [100, 100, 100, 1000, 1000, 1000],
    "z_itl": [20.0, 30.0, 40.0, 20.0, 35.0, 50.0],
    "z_thpt_per_gpu": [50.0, 400.0, 800.0, 40.0, 200.0, 270.0],
    "max_kv_tokens": 16000,
}
"""Slow enough that the milliseconds of a busy machine are a small part."""

SMALL = (
    *("--isl", "500", "--osl", "40", "--ttft", "1000", "--itl", "100", "--gpus", "1"),
    *("--prefill-interpolation-granularity", "3", "--decode-interpolation-granularity", "1"),
)


class Profiler:
    """Runs of the command with the same output directory."""

    def __init__(self, directory: Path) -> None:
        self.output_dir = directory / "results"
        self.output = directory / "profiler.txt"
        # Unix socket paths are limited to 107 characters; pytest's directories are long.
        self.runtime_base = Path(tempfile.mkdtemp(prefix="dp-", dir="/tmp"))
        self._environment = {
            **os.environ,
            "DYN_LOCAL_STATE_DIR": str(directory / "state"),
            "DYNAPLAN_NODE_DIR": str(directory / "node"),
            "DYNAPLAN_MEMORY_DIR": str(directory),
            "XDG_RUNTIME_DIR": str(self.runtime_base),
            "HOME": str(directory),
        }
        self.seen: set[psutil.Process] = set()

    def spawn(self, *options: str) -> subprocess.Popen[bytes]:
        command = [dynaplan(), "profile-sla", "--output-dir", str(self.output_dir), *options]
        with self.output.open("wb") as output:
            return subprocess.Popen(
                command, cwd=REPOSITORY, env=self._environment, stdout=output, stderr=subprocess.STDOUT
            )

    def run(self, *options: str, timeout_s: float = 180.0) -> tuple[int, str]:
        """The exit code, and what the user read; nothing that it started is left."""
        process = self.spawn(*options)
        try:
            wait_until(lambda: self._watched(process) is not None, timeout_s)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)
        return process.returncode, self.text

    def _watched(self, process: subprocess.Popen[bytes]) -> int | None:
        """The exit code, when there is one; on the way every process below it is noted."""
        try:
            self.seen |= set(psutil.Process(process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            pass
        return process.poll()

    def interrupt(self, process: subprocess.Popen[bytes]) -> int:
        """Ctrl-C; the exit code."""
        self._watched(process)
        process.send_signal(signal.SIGINT)
        return process.wait(60)

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def measured(self) -> list[dict[str, Any]]:
        """The points in the journal."""
        path = self.output_dir / "measurements.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        entries = [json.loads(line) for line in lines]
        return [entry for entry in entries if "engine" not in entry["key"]]

    def left(self) -> list[psutil.Process]:
        running = (each for each in self.seen if each.is_running())
        return [each for each in running if each.status() != psutil.STATUS_ZOMBIE]

    def close(self) -> None:
        try:
            wait_until(lambda: not self.left(), 6.0)
        finally:
            for process in self.left():
                process.kill()
            shutil.rmtree(self.runtime_base, ignore_errors=True)


@pytest.fixture
def profiler(tmp_path: Path) -> Iterator[Profiler]:
    made = Profiler(tmp_path)
    yield made
    made.close()


@pytest.fixture
def known(tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """Options of the disaggregated graph on the simulated engine, timed by the known profile."""
    path = tmp_path / "known.json"
    path.write_text(json.dumps(KNOWN))
    worker = {"profile": str(path), "max-model-len": 1000, "max-num-seqs": 8, "kv-total-tokens": 16000}
    overrides = [
        f"--{service}.{key}={value}"
        for service in ("VllmWorker", "PrefillWorker")
        for key, value in worker.items()
    ]

    def options(*more: str) -> tuple[str, ...]:
        return ("--config", "disagg.yaml", *SMALL, *overrides, *more)

    return options


@in_torture
@pytest.mark.alone
@pytest.mark.timeout(240)
def test_the_measured_profile_is_the_one_that_the_engine_was_fed_with_and_an_interruption_costs_nothing(
    profiler: Profiler, known: Callable[..., tuple[str, ...]]
) -> None:
    process = profiler.spawn(*known())
    wait_until(lambda: bool(profiler.measured()), 45.0)
    assert profiler.interrupt(process) == 130
    assert "The same command goes on" in profiler.text
    wait_until(lambda: not profiler.left())
    before = profiler.measured()

    code, text = profiler.run(*known())
    assert code == 0, text
    assert f"prefill TP 1: {len(before)} of 5 points are in the journal" in text
    assert profiler.measured()[: len(before)] == before
    _assert_known(profiler.measured())
    assert "Suggested prefill TP:1" in text and "Suggested decode TP:1" in text
    assert (profiler.output_dir / "selected_prefill_interpolation" / "raw_data.npz").is_file()
    assert (profiler.output_dir / "selected_decode_interpolation" / "raw_data.npz").is_file()
    assert (profiler.output_dir / "config_with_planner.yaml").is_file()

    profiler.seen.clear()
    code, text = profiler.run(*known())
    assert (code, profiler.seen) == (0, set()), "a third run measures nothing, and starts nothing"


def _assert_known(points: list[dict[str, Any]]) -> None:
    timing = MeasuredProfile.from_document(KNOWN, "known").timing()
    kinds = {entry["key"]["kind"] for entry in points}
    assert kinds == {"prefill", "decode"}
    for entry in points:
        values = entry["values"]
        if entry["key"]["kind"] == "prefill":
            fed_ms = timing.prefill_ms(values["isl_tokens"])
            # What is added is real, and the machine's: the way of a request through frontend and worker.
            assert fed_ms - 3.0 <= values["ttft_ms"] <= 1.1 * fed_ms + 30.0, values
        else:
            context_tokens = values["isl_tokens"] + values["osl_tokens"] / 2
            concurrency = values["concurrency"]
            fed_ms = timing.decode_ms(concurrency, concurrency * context_tokens)
            assert values["itl_ms"] == pytest.approx(fed_ms, rel=0.1), values


@in_torture
@pytest.mark.alone
@pytest.mark.timeout(240)
def test_llamacpp_is_measured_for_real(profiler: Profiler, tmp_path: Path) -> None:
    model = tiny_gguf(tmp_path)
    code, text = profiler.run(
        *("--config", "llamacpp.yaml", f"--Common.model={model}", "--isl", "200", "--osl", "200"),
        *("--max-context-length", "512", "--Common.max-model-len=512", "--Common.max-num-seqs=2"),
        *("--prefill-interpolation-granularity", "3", "--decode-interpolation-granularity", "1"),
    )
    assert code == 0, text
    points = profiler.measured()
    concurrencies = {entry["key"]["concurrency"] for entry in points if entry["key"]["kind"] == "decode"}
    assert concurrencies == {1, 2}
    ttfts_ms = {
        entry["values"]["isl_tokens"]: entry["values"]["ttft_ms"]
        for entry in points
        if entry["key"]["kind"] == "prefill"
    }
    assert len(ttfts_ms) == 5
    assert ttfts_ms[max(ttfts_ms)] > ttfts_ms[min(ttfts_ms)]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--config", "nowhere.yaml"), "-f nowhere.yaml: no such file"),
        pytest.param(
            ("--config", "disagg.yaml", "--isl", "90000"), "more than a context of", marks=in_torture
        ),
        (("--config", "disagg.yaml", "--gpus", "0"), "Expected at least 1"),
        (("--config", "disagg.yaml", "--VllmWorker.profil=x"), "profil"),
        (
            ("--config", "disagg.yaml", "--PrefillWorker.jitter=7"),
            "Error: PrefillWorker.jitter = 7: expected",
        ),
    ],
)
def test_input_that_cannot_work_is_told_and_nothing_is_left(
    profiler: Profiler, options: tuple[str, ...], why: str
) -> None:
    code, text = profiler.run(*options, "--max-gpus-per-engine", "1")
    assert code == 2, text
    assert why in text
    assert "Traceback" not in text


def test_an_engine_that_does_not_start_is_told_with_the_end_of_its_log(
    profiler: Profiler, tmp_path: Path
) -> None:
    model = tiny_gguf(tmp_path)
    model.write_bytes(model.read_bytes()[:40_000])
    code, text = profiler.run("--config", "llamacpp.yaml", f"--Common.model={model}")
    assert code in (1, 2), text
    assert "Error: " in text and "Traceback" not in text.split("Error: ")[0]
