"""The guide's two programs, each a process of its own, find and call each other through a real store."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynaplan.process.guard import guard_command
from tests.fakes.polling import wait_until
from tests.fakes.servers import Server

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "joining.md"
PROGRAM = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)


class Programs:
    """The guide's programs in a directory, and the processes that run them."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory = directory
        self.environment = {**os.environ, "DYNAPLAN_WORKER_TOKEN": "t" * 32, **environment}
        self.processes: list[subprocess.Popen[str]] = []
        for name, text in PROGRAM.findall(GUIDE.read_text()):
            (directory / name).write_text(text)

    def start(self, name: str) -> subprocess.Popen[str]:
        command = guard_command([sys.executable, name], os.getpid())
        process = subprocess.Popen(
            command, cwd=self.directory, env=self.environment, stdout=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        return process

    def ask(self) -> list[str]:
        """What ``ask.py`` prints, which waits for an instance."""
        output, _ = self.start("ask.py").communicate(timeout=60)
        assert self.processes[-1].returncode == 0
        return output.splitlines()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(params=["etcd", pytest.param("file", marks=pytest.mark.slow)])
def programs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Programs]:
    if request.param == "etcd":
        server: Server = request.getfixturevalue("etcd")
        environment = server.environment
    else:
        (tmp_path / "store").mkdir(mode=0o700)
        environment = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(tmp_path / "store")}
    made = Programs(tmp_path, environment)
    yield made
    made.close()


def test_the_guides_programs_answer_each_other_and_survive_a_kill_and_a_drain(programs: Programs) -> None:
    first, second = programs.start("backend.py"), programs.start("backend.py")
    assert programs.ask() == ["hello!", "there!"]
    first.kill()
    begun_s = time.monotonic()
    assert programs.ask() == ["hello!", "there!"]  # although the killed one is still registered
    assert time.monotonic() - begun_s < 30
    second.terminate()
    wait_until(lambda: second.poll() is not None)
    assert second.returncode == 0
