"""``tox -e gpu`` without a GPU: its parts run on the simulated driver, the others skip with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynaplan.fleet.gpu_devices import nvml
from tests.e2e.deployment import REPOSITORY
from tests.gpu.conftest import part_of
from tests.gpu.engines import version_said


@pytest.mark.skipif(bool(nvml()), reason="there are GPUs here: `tox -e gpu` is the test")
def test_the_report_has_the_figures_of_what_ran_and_the_reason_of_what_did_not(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    asked = {"DYNAPLAN_GPU_ENGINES": " simulated, vllm", "DYNAPLAN_GPU_REPORT": str(tmp_path / "report")}
    ended = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | asked, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    ran = {each["name"]: each for each in report["parts"] if each["engine"] == "simulated"}
    assert {each["outcome"] for each in ran.values()} == {"passed"}
    assert ran["its targets are kept under load and nothing is lost"]["figures"]["lost"] == 0
    assert ran["a model sleeps wakes and is stopped to save power"]["figures"]["woke_s"] > 0
    assert report["box"]["driver"].startswith("none (")
    skipped = [each for each in report["parts"] if each["engine"] == "vllm"]
    assert len(skipped) == len(ran)
    assert all("no NVIDIA GPU here" in each["why"] for each in skipped)
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| simulated | its steps are learnt | passed |" in text
    assert "attach it to an issue" in ended.stdout


def test_an_engine_that_is_not_known_is_refused() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", "tests/gpu"]
    environment = os.environ | {"DYNAPLAN_GPU_ENGINES": "simulated,vlm"}
    ended = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0
    assert "DYNAPLAN_GPU_ENGINES: no engine 'vlm'; known: vllm, llama-server, simulated" in ended.stdout


def test_a_deployment_that_does_not_end_as_it_should_is_a_part_of_the_report() -> None:
    report = pytest.TestReport(
        "test_box.py::test_x[vllm]", ("", 0, ""), {}, "failed", "assert 3 < 1", "teardown", duration=2.0
    )
    part = part_of("test_x[vllm]", report)
    assert (part.engine, part.name, part.outcome) == ("vllm", "the deployment ends", "failed")


@pytest.mark.parametrize("to", ["", " >&2"])
def test_the_version_is_told_whatever_else_the_program_prints(to: str) -> None:
    script = f"echo 'ggml_cuda_init: found 1 CUDA devices:'{to}; echo 'version: 6 (1234abc)'{to}; echo x{to}"
    assert version_said("sh", "-c", script) == "6 (1234abc)"
    assert version_said("sh", "-c", "exit 3") == "not known (exit code 3)"
