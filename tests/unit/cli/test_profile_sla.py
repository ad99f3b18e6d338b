"""What ``profile-sla`` ends with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.cli import profile_sla


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
    options: Any = SimpleNamespace(graph=graph, config=sections, output_dir=Path("/my results"))
    line = profile_sla._next_step(options).splitlines()[0]
    assert line.endswith(f"dynaplan serve {expected} -f '/my results/config_with_planner.yaml'")
