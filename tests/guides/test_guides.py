"""A reader with an empty home follows each guide, command by command, as it is written."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.deployment import REPOSITORY
from tests.e2e.readme import ADDRESS, Shell
from tests.guides.reading import commands, fenced, files, invocations
from tests.guides.walks import ELSEWHERE, RUNNING, WALKS, Walk

GUIDES = sorted(path for path in (REPOSITORY / "docs/guides").glob("*.md") if commands(path))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "bin").mkdir()
    yield tmp_path


@pytest.mark.timeout(900)
@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_the_commands_of_a_guide_can_be_followed(guide: Path, home: Path, tiny_gguf: Path) -> None:
    walk = WALKS.get(guide.stem, Walk())
    shutil.copy(tiny_gguf, home / "model.gguf")
    typed = [each for each in commands(guide) if not each.startswith((*ELSEWHERE, *walk.skipped))]
    if not typed:
        pytest.skip(f"none of its commands can run here: {dict(walk.skipped)}")
    written({**walk.given, **files(guide)}, home)
    path = f"{home / 'bin'}:{Path(os.sys.executable).parent}:{os.environ['PATH']}"
    reader = Reader(walk, Shell(home, {"PATH": path, **walk.environment}))
    try:
        for command in (*walk.before, *typed):
            reader.type(command)
    finally:
        reader.close()
    shown = "".join(file.read_text() for file in home.glob("output-*.txt"))
    assert "Traceback" not in shown, shown


@pytest.mark.timeout(600)
def test_the_programs_of_the_guide_to_python_run_as_they_are(home: Path, tiny_gguf: Path) -> None:
    pytest.importorskip("openai")
    shutil.copy(tiny_gguf, home / "model.gguf")
    program = "\n".join(fenced(REPOSITORY / "docs/guides/python.md", "python"))
    written({"program.py": program}, home)
    shell = Shell(home)
    try:
        assert "http://127.0.0.1:" in shell.run("python program.py", 300.0)
    finally:
        shell.close()


def written(given: dict[str, str], home: Path) -> None:
    """Write the files; those that begin with #! can be run."""
    for name, text in given.items():
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755 if text.startswith("#!") else 0o644)


class Reader:
    """Types commands; what runs until Ctrl-C has a terminal of its own, until the guide begins it again."""

    def __init__(self, walk: Walk, shell: Shell) -> None:
        self._walk = walk
        self._shell = shell
        self._terminals: dict[str, ExitStack] = {}

    def type(self, command: str) -> None:
        """Type the command, with what the reader puts in the place of a placeholder, and what follows."""
        line = command.replace("localhost:8000", ADDRESS)
        for text, other in self._walk.instead.items():
            line = line.replace(text, other)
        line = re.sub(r"--port \d+", "--port 0", line)
        print(f"$ {line}")
        self._run(line)
        for each in self._walk.after.get(command, ()):
            self.type(each)

    def _run(self, line: str) -> None:
        until = next((mark for begin, mark in self._walk.until.items() if line.startswith(begin)), None)
        kind = next((begin for begin in RUNNING if line.startswith(begin)), "")
        if until is not None:
            with self._shell.running(line, until):
                pass
        elif is_serve(line):
            self._terminal(f"serve {namespace_of(line)}").enter_context(self._shell.serving(line))
        elif kind:
            terminal = self._terminal(f"{kind} {namespace_of(line)}")
            terminal.enter_context(self._shell.running(line, RUNNING[kind]))
        else:
            print(self._shell.run(line, 600.0))

    def _terminal(self, name: str) -> ExitStack:
        if before := self._terminals.pop(name, None):
            before.close()
        self._terminals[name] = ExitStack()
        return self._terminals[name]

    def close(self) -> None:
        """End all that runs, the last begun first."""
        for terminal in reversed(self._terminals.values()):
            terminal.close()
        self._shell.close()


def is_serve(line: str) -> bool:
    """Tell whether the line ends with a ``serve`` that stays in its terminal."""
    last = (invocations(line) or [[""]])[-1]
    return last[0] == "serve" and not {"--detach", "--dry-run"} & set(last)


def namespace_of(line: str) -> str:
    found = re.search(r"--namespace[= ](\S+)", line)
    return found[1] if found else "dynamo"
