"""``dynaplan frontend`` and ``dynaplan worker`` as a user starts them, each in a process group of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fakes.polling import PATIENCE_S, eventually

TOKEN_FILE = "namespace.token"


class RunningComponent:
    """One component; its output is in a file, ``close`` makes sure that nothing of it is left.

    ``prefix`` is what its command line begins with, a program that becomes it.
    """

    def __init__(self, directory: Path, environment: dict[str, str], *arguments: str) -> None:
        self.arguments = arguments
        self.output = directory / f"{'-'.join(arguments[:1])}-{len(list(directory.iterdir()))}.txt"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ETCD_", "DYN_"))},
            "DYN_LOCAL_STATE_DIR": str(directory / "state"),
            "DYNAPLAN_NODE_DIR": str(directory / "node"),
            "DYNAPLAN_MEMORY_DIR": str(directory),
            "HOME": str(directory),
            **environment,
        }
        self.prefix: Sequence[str] = ()
        self.program = str(Path(sys.executable).with_name("dynaplan"))
        self.process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> RunningComponent:
        command = [*self.prefix, self.program, *self.arguments]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                cwd=self.output.parent,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        return self

    async def ready(self, within_s: float = 2 * PATIENCE_S) -> RunningComponent:
        """Return when it has registered."""
        assert self.process is not None

        def is_ready() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"it ended with {self.process.returncode}:\n{self.text}")
            return "INFO dynaplan.worker.lifecycle: ready: " in self.text

        await eventually(is_ready, within_s)
        return self

    @property
    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def public_url(self) -> str:
        found = re.findall(r"the OpenAI API is at (\S+)", self.text)
        return str(found[-1])

    def interrupt(self) -> None:
        """Ctrl-C: the whole group gets it."""
        os.killpg(self.pid, signal.SIGINT)

    async def exit_code(self) -> int:
        assert self.process is not None
        process = self.process
        await eventually(lambda: process.poll() is not None)
        return int(process.returncode)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
