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

    def find(self) -> str:
        """Return what the engine runs with: the module's name, or the command's path; empty without both."""
        if importlib.util.find_spec(self.module):
            return self.module
        return shutil.which(self.command) or ""

    def check(self, engine: str, options: Mapping[str, Any]) -> None:
        """Raise ConfigError, with what to do, when the engine of that name is not installed."""
        program = self._program(options.get(self.option))
        if program:
            if shutil.which(program) is None:
                raise ConfigError(
                    f"{self.option} is {options[self.option]!r}, but there is no program {program}",
                    hint="Expected a program on PATH, or the path of one that may be executed.",
                )
        elif not self.find():
            raise ConfigError(
                f"engine is {engine!r}, which is not installed: neither the Python module {self.module} "
                f"nor the command {self.command} is here",
                hint=f"pip install '{self.package}', or name the program with {self.option}.",
            )

    def _program(self, given: Any) -> str:
        """Return the program in the option's value: a path, a command line, words, or true; else empty."""
        match given:
            case True:
                return self.command
            case str() if given.strip():
                whole = os.path.expanduser(given)
                return whole if self.is_path or shutil.which(whole) else shlex.split(given)[0]
            case [str() as program, *_]:
                return program
            case _:
                return ""
