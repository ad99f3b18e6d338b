from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import coverage_floors
from tests.coverage_floors import flat_of, main, read_floors, shares
from tests.unit.house.source import PACKAGE, REPOSITORY


def report(**covered: int) -> dict[str, object]:
    """A report in which so much of 10 lines and 10 branches of each file is covered."""
    return {
        "files": {
            name: {
                "summary": {
                    "covered_lines": lines,
                    "num_statements": 10,
                    "covered_branches": lines,
                    "num_branches": 10,
                }
            }
            for name, lines in covered.items()
        }
    }


@pytest.mark.parametrize(
    ("name", "flat"),
    [
        ("dynaplan/store/etcd.py", "store"),
        ("dynaplan/engines/timing_model/engine_model.py", "engines"),
        ("dynaplan/util/clock.py", "util"),
        ("dynaplan/services.py", "services"),
    ],
)
def test_a_flat_is_a_folder_of_the_package_or_a_module_at_its_top(name: str, flat: str) -> None:
    assert flat_of(name) == flat
    assert flat_of(f"/somewhere/else/{name}") == flat


def test_the_files_of_a_flat_count_together() -> None:
    found = shares(
        report(**{"dynaplan/cli/a.py": 10, "dynaplan/cli/b.py": 5, "dynaplan/process/ports.py": 10})
    )
    assert found == {"cli": 75.0, "process": 100.0}


@pytest.mark.parametrize(("covered", "code"), [(10, 0), (9, 0), (8, 1)])
def test_a_flat_below_its_floor_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, covered: int, code: int
) -> None:
    (tmp_path / "setup.cfg").write_text("[coverage_floors]\ncli = 90\n")
    monkeypatch.setattr(coverage_floors, "REPOSITORY", tmp_path)
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report(**{"dynaplan/cli/a.py": covered, "dynaplan/process/ports.py": 10})))
    assert main([str(file)]) == code


def test_every_flat_with_a_floor_is_there() -> None:
    flats = {flat_of(str(module.relative_to(REPOSITORY))) for module in PACKAGE.rglob("*.py")}
    assert read_floors(REPOSITORY / "setup.cfg").keys() <= flats
