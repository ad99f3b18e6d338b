"""Files that hold nothing of the machine that they were written on."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.house.source import REPOSITORY, short

FOLDERS = ("dynaplan", "graphs", "statefiles", "tests", "docs", ".ci")
SUFFIXES = (".py", ".md", ".yaml", ".cfg", ".toml", ".ini", ".json", "")


def test_no_path_of_a_developers_machine_is_written_down() -> None:
    files = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*")]
    files += [path for path in REPOSITORY.iterdir() if not path.name.startswith(".")]
    homes = re.compile(r"(?<![\w.])/(?:work|home/\w+|Users/\w+|root)/\w+")
    found = [
        f"{short(path)}:{number}"
        for path in files
        if path.is_file() and path.suffix in SUFFIXES and path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if homes.search(line)
    ]
    assert found == []


def test_nobody_is_told_to_install_a_package_of_our_name_from_an_index() -> None:
    """The name on the index is not ours: a clone is installed by its path, a library by its own name."""
    files = [*(REPOSITORY / "dynaplan").rglob("*.py"), *REPOSITORY.rglob("*.md"), REPOSITORY / "setup.cfg"]
    told = re.compile(r"dynaplan\[|(?:pip|uv|pipx)[\w ]* install[^`\n&]* '?dynaplan\b(?!/)")
    assert [short(path) for path in files if told.search(path.read_text(errors="replace"))] == []
