"""The environment of a helper process: Python modules of ours that a process runs beside itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import dynaplan

PASSED_ON = ("PYTHON", "COV")
"""Prefixes of the variables that a helper gets: none of them is a secret, and it needs no other."""


def helper_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of Python and its coverage; the helper finds this dynaplan, installed or not."""
    environment = {name: value for name, value in environ.items() if name.startswith(PASSED_ON)}
    paths = [environment.get("PYTHONPATH", ""), str(Path(dynaplan.__file__).resolve().parents[1])]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment
