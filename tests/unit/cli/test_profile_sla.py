"""``dynaplan profile-sla``: its progress, and what it ends with."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.cli import profile_sla
from dynaplan.cli.profile_sla import ProfileProgress
from dynaplan.lab.profiling.recommendation import Goal
from dynaplan.util.errors import ConfigError
from dynaplan.util.progress import ProgressLine


@pytest.mark.parametrize(
    ("graph", "sections", "expected"),
    [
        ("graphs.agg:Frontend", {"PrefillWorker": {}}, "graphs.disagg:Frontend"),
        ("graphs.agg:Frontend", {"VllmWorker": {}}, "graphs.agg:Frontend"),
        ("mine:Frontend", {"PrefillWorker": {}}, "mine:Frontend"),
    ],
)
def test_the_last_line_is_the_command_that_goes_on_with_the_result(
    graph: str, sections: dict[str, Any], expected: str
) -> None:
    options: Any = SimpleNamespace(
        graph=graph, config=sections, output_dir=Path("/my results"), goal=Goal(3000, 500, 500.0, 50.0)
    )
    line = profile_sla._next_step(options).splitlines()[0]
    assert line.endswith(f"dynaplan serve {expected} -f '/my results/config_with_planner.yaml'")
    assert "TTFT 500 ms and ITL 50 ms" in profile_sla._next_step(options)


def test_points_are_counted_on_standard_error_and_lines_told_on_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s, shown = [0.0], io.StringIO()
    progress = ProfileProgress(ProgressLine(shown, 30.0, lambda: now_s[0]))
    with progress.stage("decode TP1", 3) as advance:
        for _ in range(2):
            now_s[0] += 10.0
            advance()
        progress.report("a point is left out")
    assert shown.getvalue().splitlines() == [
        "decode TP1: 0 of 3 points measured",
        "decode TP1: 1 of 3 points measured",
        "decode TP1: 2 of 3 points measured",
    ]
    assert capsys.readouterr().out == "a point is left out\n"


@pytest.mark.parametrize("service", ["VllmWorker", "PrefillWorker"])
def test_a_wrong_option_is_told_with_the_service_that_has_it(service: str) -> None:
    sections = {"VllmWorker": {"engine": "sim"}, "PrefillWorker": {"engine": "sim"}}
    sections[service]["jitter"] = "much"
    options: Any = SimpleNamespace(graph="graphs.agg:Frontend", config=sections)
    with pytest.raises(ConfigError, match=rf"^{service}\.jitter = 'much': expected a number"):
        profile_sla._check_names(options)


def test_options_of_an_estimate_without_one_are_refused() -> None:
    options: Any = SimpleNamespace()
    with pytest.raises(ConfigError, match="--gpu-type is 'l4'") as caught:
        profile_sla._measured(options, {"gpu_type": "l4"})
    assert caught.value.hint == "--gpu-type is for --estimate."
