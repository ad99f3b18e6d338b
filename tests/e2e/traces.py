"""What a deployment may leave on the machine, looked for without asking the deployment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dynaplan.fleet.startup_times import FILE_NAME as STARTUP_TIMES
from tests.e2e.deployment import Deployment

IS_TORTURE = bool(os.environ.get("DYNAPLAN_TORTURE"))
in_torture = pytest.mark.skipif(not IS_TORTURE, reason="in tox -e torture")
"""For what takes long and is alike something that is always tested."""

PAGE_BYTES = 4096


def processes_of(deployment: Deployment) -> dict[int, str]:
    """Every process whose environment is this deployment's: pid -> command line. Zombies have none."""
    marks = {
        f"DYN_NAMESPACE={deployment.namespace}".encode(),
        f"XDG_RUNTIME_DIR={deployment.runtime_base}".encode(),
    }
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            environment = set((directory / "environ").read_bytes().split(b"\0"))
            if marks <= environment:
                shown = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(directory.name)] = deployment.command_line(int(directory.name), shown)
        except OSError:
            continue
    return found


def files_of(deployment: Deployment) -> list[str]:
    """What is left of its runtime directory, its statefile and its locks, and its claims of GPUs.

    What was learnt of start-up times is there for the next deployment.
    """
    namespace = deployment.namespace
    left = [path for path in deployment.runtime_base.rglob("*") if namespace in path.name]
    for directory in ("state", "node"):
        left += [path for path in (deployment.directory / directory).glob("*") if path.is_file()]
        left = [path for path in left if path.name != STARTUP_TIMES]
    return sorted(str(path) for path in left)


@contextmanager
def small_disk(directory: Path, kilobytes: int = 64) -> Iterator[Path]:
    """A file system of that size at ``directory``; OSError when this process may not mount one."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    size = f"size={kilobytes}k,mode=0700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(directory)], capture_output=True, check=False
    )
    if mounted.returncode:
        raise OSError(mounted.stderr.decode().strip())
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(directory: Path) -> Path:
    """A file that takes all the space that is left there."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(PAGE_BYTES))
        except OSError:
            return ballast
