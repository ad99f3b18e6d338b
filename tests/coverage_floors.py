"""Hold every flat of the package to its floor: ``python -m tests.coverage_floors REPORT``.

``REPORT`` is what ``coverage json`` writes. ``[coverage_floors]`` of setup.cfg names the share of lines and
branches, in percent, below which a flat must not fall; when tests have been added, raise it. A flat is a
folder of the package, or a module at its top. Flats without a floor must be covered whole.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from configparser import ConfigParser
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
WHOLE = 100.0


def main(arguments: list[str]) -> int:
    """Print the table; 1 when a flat is below its floor."""
    flats = shares(json.loads(Path(arguments[0]).read_text()))
    floors = read_floors(REPOSITORY / "setup.cfg")
    for flat, share in sorted(flats.items()):
        floor = floors.get(flat, WHOLE)
        print(f"{flat:24} {share:6.2f} %  floor {floor:6.2f} %{'  TOO LOW' if share < floor else ''}")
    unknown = sorted(floors.keys() - flats.keys())
    if unknown:
        print(f"floors of flats that are not there: {', '.join(unknown)}")
    return int(bool(unknown) or any(share < floors.get(flat, WHOLE) for flat, share in flats.items()))


def shares(report: dict[str, Any]) -> dict[str, float]:
    """The covered share of the lines and branches of every flat, in percent, rounded down to hundredths."""
    covered: dict[str, int] = defaultdict(int)
    whole: dict[str, int] = defaultdict(int)
    for name, file in report["files"].items():
        summary = file["summary"]
        flat = flat_of(name)
        covered[flat] += summary["covered_lines"] + summary["covered_branches"]
        whole[flat] += summary["num_statements"] + summary["num_branches"]
    return {flat: covered[flat] * 10_000 // whole[flat] / 100 for flat in whole if whole[flat]}


def flat_of(name: str) -> str:
    """The flat of a file: ``store``, ``planner``, or a module at the top like ``services``."""
    return Path(name).with_suffix("").parts[Path(name).parts.index("dynaplan") + 1]


def read_floors(config: Path) -> dict[str, float]:
    """The floors of setup.cfg: flat -> percent."""
    parser = ConfigParser()
    parser.read(config)
    return {flat: float(percent) for flat, percent in parser["coverage_floors"].items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
