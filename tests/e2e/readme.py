"""The commands of README.md, as it shows them, and a shell to run them in."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from tests.e2e.deployment import REPOSITORY, dynaplan
from tests.fakes.polling import PATIENCE_S, wait_until

PROGRAMS = ("dynaplan", "circusctl", "curl", "pip", "tensorboard", "tox")
"""The programs whose names begin a command in running text."""

ADDRESS = "127.0.0.1:8000"
"""The address of the README, in whose place a test has one of its own."""


def commands() -> list[str]:
    """Every command, in its order: indented blocks, ``$`` lines of fenced ones, and code in the text.

    Commands that ``&&`` joins are told apart, and a variable stays with the command that uses it.
    """
    found: list[str] = []
    waiting = (REPOSITORY / "README.md").read_text().splitlines()
    is_fenced = False
    while waiting:
        line = waiting.pop(0)
        is_fenced ^= line.startswith("```")
        is_shown = line.startswith("$ ") if is_fenced else line.startswith("    ")
        if is_shown:
            found += _whole(line[2:] if is_fenced else line[4:], waiting).split(" && ")
        elif not is_fenced:
            inline = re.findall(r"`([^`]+)`", line)
            found += [code for code in inline if code.split()[0] in PROGRAMS and " " in code]
    return [
        f"{before}\n{command}" if is_assignment(before) else command
        for before, command in zip(["", *found], found, strict=False)
        if not is_assignment(command)
    ]


def is_assignment(command: str) -> bool:
    return re.match(r"\w+=", command) is not None


REAL_MODEL = "smollm2"
"""Part of every command that needs the downloaded model."""


def _whole(command: str, waiting: list[str]) -> str:
    """The command without its comment, with the lines that go on with it: after a backslash, in quotes."""
    command = re.sub(r"\s{2,}# .*", "", command)
    while command.endswith("\\") or command.count("'") % 2:
        command += "\n" + waiting.pop(0)
    return command


class Shell:
    """A user with an empty home, in an empty directory, who types the README's commands into bash."""

    def __init__(self, directory: Path, environment: Mapping[str, str] | None = None) -> None:
        self.directory = directory
        # Unix socket paths are limited to 107 characters; pytest's directories are long.
        self.runtime_base = Path(tempfile.mkdtemp(prefix="dp-", dir="/tmp"))
        self.address = ADDRESS
        self._numbers = count()
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("DYN")},
            "PATH": f"{Path(dynaplan()).parent}:{os.environ['PATH']}",
            "HOME": str(directory),
            "XDG_RUNTIME_DIR": str(self.runtime_base),
            "DYNAPLAN_NODE_DIR": str(directory / "node"),
            "DYNAPLAN_MEMORY_DIR": str(directory),
            "DYNAMO_PORT": "0",
            **(environment or {}),
        }

    def close(self) -> None:
        shutil.rmtree(self.runtime_base, ignore_errors=True)

    def run(self, command: str, timeout_s: float = 2 * PATIENCE_S) -> str:
        """What the command prints; it must succeed."""
        result = subprocess.run(
            self._bash(command),
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.stderr, result.stderr
        return result.stdout

    @contextmanager
    def running(self, command: str, until: str) -> Iterator[Path]:
        """Run the command; the block begins once it has printed ``until``, and Ctrl-C ends both."""
        output = self.directory / f"output-{next(self._numbers)}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                self._bash(command),
                cwd=self.directory,
                env=self.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(lambda: process.poll() is not None or until in output.read_text(), 2 * PATIENCE_S)
            assert until in output.read_text(), f"{command}\n{output.read_text()}"
            yield output
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            process.wait(PATIENCE_S)

    @contextmanager
    def serving(self, command: str) -> Iterator[Path]:
        """Run a ``dynaplan serve`` line; the block begins when it is ready, and its output is given."""
        with self.running(command, "Ready after") as output:
            ready = re.search(r"^Ready after .*: http://(\S+)$", output.read_text(), re.M)
            assert ready, output.read_text()
            self.address = ready[1]
            yield output

    def _bash(self, command: str) -> list[str]:
        return ["bash", "-c", command.replace(ADDRESS, self.address)]
