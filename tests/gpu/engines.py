"""The engines that a box may have, each as the entry of a model that fits any GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL_VARIABLE, GGUF_VARIABLE = "DYNAPLAN_GPU_MODEL", "DYNAPLAN_GPU_GGUF"
"""A model of the user's own, for vLLM and for llama-server; without them tiny ones."""

VLLM_VARIABLE = "DYNAPLAN_VLLM_PYTHON"
"""A Python with vLLM and dynaplan; without it this one, if it has vLLM."""


@dataclass(frozen=True)
class Engine:
    """``entry`` is that of a model, ``program`` the dynaplan that serves it.

    Load is put on it for ``load_s``; idle models are put away after ``ttl_s``, and sleep where it ``sleeps``.
    """

    name: str
    version: str
    entry: Mapping[str, Any]
    program: str = ""
    load_s: float = 60.0
    ttl_s: float = 12.0
    sleeps: bool = False


class NotInstalled(Exception):
    """The engine is not on this box; the text says what would name it."""


def simulated() -> Engine:
    """For the tests of the run itself."""
    entry = {"engine": "sim", "startup-time": 0.5}
    return Engine("simulated", "-", entry, load_s=5.0, ttl_s=2.0, sleeps=True)


def vllm(tiny_model: Path) -> Engine:
    named = os.environ.get(VLLM_VARIABLE, "")
    if not named and importlib.util.find_spec("vllm") is None:
        raise NotInstalled(f"vLLM is not installed; {VLLM_VARIABLE} names a Python with vLLM and dynaplan")
    python = Path(named or sys.executable)
    version = version_said(str(python), "-c", "import vllm; print('version:', vllm.__version__)")
    model = os.environ.get(MODEL_VARIABLE, "")
    entry: dict[str, Any] = {"engine": "vllm", "model": model or str(tiny_model)}
    entry |= {"max-model-len": 2048, "gpu-memory-utilization": 0.4}
    if not model:
        entry |= {"load-format": "dummy", "enforce-eager": True}
    return Engine("vllm", version, entry, str(python.with_name("dynaplan")), sleeps=True)


def llama_server(pulled_model: Callable[[], Path]) -> Engine:
    program = os.environ.get("DYNAPLAN_LLAMA_SERVER") or shutil.which("llama-server")
    if not program:
        raise NotInstalled("llama-server is not in PATH; DYNAPLAN_LLAMA_SERVER names it")
    version = version_said(program, "--version")
    model = os.environ.get(GGUF_VARIABLE) or str(pulled_model())
    command = f"{program} -m {model} --port ${{PORT}} -ngl 99 -c 16384 -np 4"
    return Engine("llama-server", version, {"command": command})


def version_said(*command: str) -> str:
    """Return what a program prints after ``version:``, among what its libraries say of the GPUs."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = re.search(r"^version:\s*(.+)", ended.stdout + ended.stderr, re.MULTILINE)
    return found[1].strip() if found else f"not known (exit code {ended.returncode})"
