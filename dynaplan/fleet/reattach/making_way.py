"""Making way for the ``serve`` of another version, and being the one that takes over.

The holder starts the other one as soon as this process has ended, and this one ends as ``kill -9`` would end
it: so an upgrade needs nothing that the death of ``serve`` does not need. The other one is on trial until it
has adopted everything; if it fails at that, the holder starts this version again.
"""

from __future__ import annotations

import hmac
import logging
import os
import signal
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import dynaplan
from dynaplan.process.holding import HolderLink
from dynaplan.util.errors import DeploymentError

log = logging.getLogger(__name__)

MAKE_WAY = "upgrade"
"""The command by which circus' endpoint is told; its properties are those of ``request``."""

PACKAGE_VARIABLE = "DYNAPLAN_TAKES_OVER"
"""The directory of the package that a ``serve`` which takes over must be of."""

ANSWERED_S = 0.1
"""Time for the answer to leave before this process ends, in seconds; without it the successor tells."""


def request(program: Sequence[str], environ: Mapping[str, str], token: str) -> dict[str, Any]:
    """Return the properties of the command: this process's own version is to take over.

    ``program`` starts ``serve``, without its arguments. The modules' path is the only variable that the
    deployment takes over from ``environ``.
    """
    variables = {PACKAGE_VARIABLE: _package()}
    if path := environ.get("PYTHONPATH"):
        variables["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    return {"program": list(program), "variables": variables, "token": token}


def make_way(
    link: HolderLink | None, arguments: Sequence[str], token: str, properties: Mapping[str, Any]
) -> str:
    """Have the holder start another version when this process has ended; return why not, or nothing.

    ``arguments`` are those with which this ``serve`` was started.
    """
    if not token or not hmac.compare_digest(str(properties.get("token")).encode(), token.encode()):
        return "that needs the token of the deployment"
    if link is None:
        return "serve has no holder, which alone could start another version: it runs with --no-supervise"
    program, variables = properties.get("program"), properties.get("variables")
    if not _are_texts(program) or not isinstance(variables, dict) or not _are_texts(list(variables.values())):
        return "a program and its variables are expected"
    assert isinstance(program, list)
    link.make_way_for([*program, *arguments], variables)
    return ""


def end_for_another() -> None:
    """End at once, and leave everything that this process has started to its successor."""
    log.info("another serve takes over")
    os.kill(os.getpid(), signal.SIGKILL)


def check_own_package(environ: MutableMapping[str, str], *, is_trial: bool) -> None:
    """Raise DeploymentError when this process takes over, and is not of the version that was asked for."""
    expected = environ.pop(PACKAGE_VARIABLE, "")
    if is_trial and expected != _package():
        raise DeploymentError(
            f"{expected} is to take over, but this is {_package()}",
            hint="Run `dynaplan upgrade` from an environment in which the new version is installed.",
        )


def _package() -> str:
    return str(Path(dynaplan.__file__).resolve().parent)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)
