"""The original's API by its own name, ``import dynamo.sdk``: only where it was asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dynaplan.config.settings.events import COMPAT_VARIABLE
from dynaplan.util.errors import ConfigError, nearest

APIS = ("dynamo",)

FOLDER = Path(__file__).resolve().parents[1] / "data" / "compat"
"""The folder that holds the modules, each API's in the package of its name."""


def enable_compat(environ: Mapping[str, str]) -> None:
    """Let the modules of the API that the environment names be imported; raises ConfigError for another one.

    They come before an installed package of that name.
    """
    name = environ.get(COMPAT_VARIABLE, "")
    if name and name not in APIS:
        raise ConfigError(f"--compat {name}: there is no such API", hint=nearest(name, APIS))
    if name and str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))


def compat_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a Python program of its own that imports the original's modules."""
    path = os.pathsep.join(filter(None, [str(FOLDER), environ.get("PYTHONPATH", "")]))
    return {**environ, COMPAT_VARIABLE: APIS[0], "PYTHONPATH": path}
