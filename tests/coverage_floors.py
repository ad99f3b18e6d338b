"""Hold every room of the package to its floor: ``python -m tests.coverage_floors REPORT``.

``REPORT`` is what ``coverage json`` writes. ``[coverage_floors]`` of setup.cfg names the share of lines and
branches, in percent, below which a room must not fall; when tests have been added, raise it. A room is a
folder of the package, or a module at its top. Rooms without a floor must be covered whole.
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
    """Print the table; 1 when a room is below its floor."""
    rooms = shares(json.loads(Path(arguments[0]).read_text()))
    floors = read_floors(REPOSITORY / "setup.cfg")
    for room, share in sorted(rooms.items()):
        floor = floors.get(room, WHOLE)
        print(f"{room:24} {share:6.2f} %  floor {floor:6.2f} %{'  TOO LOW' if share < floor else ''}")
    unknown = sorted(floors.keys() - rooms.keys())
    if unknown:
        print(f"floors of rooms that are not there: {', '.join(unknown)}")
    return int(bool(unknown) or any(share < floors.get(room, WHOLE) for room, share in rooms.items()))


def shares(report: dict[str, Any]) -> dict[str, float]:
    """The covered share of the lines and branches of every room, in percent, rounded down to hundredths."""
    covered: dict[str, int] = defaultdict(int)
    whole: dict[str, int] = defaultdict(int)
    for name, file in report["files"].items():
        summary = file["summary"]
        room = room_of(name)
        covered[room] += summary["covered_lines"] + summary["covered_branches"]
        whole[room] += summary["num_statements"] + summary["num_branches"]
    return {room: covered[room] * 10_000 // whole[room] / 100 for room in whole if whole[room]}


def room_of(name: str) -> str:
    """The room of a file: ``adapters/stores``, ``core/sizing``, ``serving``, or a module like ``ports``."""
    first, *rest = Path(name).with_suffix("").parts[Path(name).parts.index("dynaplan") + 1 :]
    return f"{first}/{rest[0]}" if first in ("adapters", "core") and len(rest) > 1 else first


def read_floors(config: Path) -> dict[str, float]:
    """The floors of setup.cfg: room -> percent."""
    parser = ConfigParser()
    parser.read(config)
    return {room: float(percent) for room, percent in parser["coverage_floors"].items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
