"""Checks that an engine is installed, made before GPUs are taken for it."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynaplan.util.errors import ConfigError


@dataclass(frozen=True)
class Requirement:
    """What one engine needs: the Python ``module``, or the ``command`` on PATH, or the one ``option`` names.

    The option is a command line, unless it ``is_path``. ``package`` is what pip installs.
    """

    module: str
    command: str
    option: str
    package: str
    is_path: bool = False


REQUIREMENTS: Mapping[str, Requirement] = {
    "llamacpp": Requirement("xllamacpp", "llama-server", "llama-server", "xllamacpp>=2026.10,<2027", True),
    "vllm": Requirement("vllm", "vllm", "vllm-command", "vllm"),
    "sglang": Requirement("sglang", "sglang", "sglang-command", "sglang"),
    "trtllm": Requirement("tensorrt_llm", "trtllm-serve", "trtllm-command", "tensorrt-llm"),
}
"""The requirement of each engine that has one."""


def find_installation(engine: str) -> str:
    """Return the module's name or the command's path with which the engine can run; empty for neither."""
    requirement = REQUIREMENTS[engine]
    if importlib.util.find_spec(requirement.module):
        return requirement.module
    return shutil.which(requirement.command) or ""


def check_installed(engine: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError, with what to do, when this engine is not installed; one without a requirement is."""
    requirement = REQUIREMENTS.get(engine)
    if requirement is None:
        return
    program = _program(requirement, options.get(requirement.option))
    if program:
        if shutil.which(program) is None:
            raise ConfigError(
                f"{requirement.option} is {options[requirement.option]!r}, but there is no program {program}",
                hint="Expected a program on PATH, or the path of one that may be executed.",
            )
    elif not importlib.util.find_spec(requirement.module) and not shutil.which(requirement.command):
        raise ConfigError(
            f"engine is {engine!r}, which is not installed: neither the Python module {requirement.module} "
            f"nor the command {requirement.command} is here",
            hint=f"pip install '{requirement.package}', or name the program with {requirement.option}.",
        )


def _program(requirement: Requirement, given: Any) -> str:
    """Return the program of the option's value: a path, a command line, its words, or true; else empty."""
    match given:
        case True:
            return requirement.command
        case str() if given.strip():
            whole = os.path.expanduser(given)
            return whole if requirement.is_path or shutil.which(whole) else shlex.split(given)[0]
        case [str() as program, *_]:
            return program
        case _:
            return ""
