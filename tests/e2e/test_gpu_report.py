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


@pytest.mark.skipif(bool(nvml()), reason="there are GPUs here: `tox -e gpu` is the test")
def test_the_report_has_the_figures_of_what_ran_and_the_reason_of_what_did_not(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    asked = {"DYNAPLAN_GPU_ENGINES": "simulated,vllm", "DYNAPLAN_GPU_REPORT": str(tmp_path / "report")}
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
