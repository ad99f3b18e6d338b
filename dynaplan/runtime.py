"""The distributed runtime: what every process of a deployment uses, a user's own included.

``connect`` joins a deployment. It is made in ``dynaplan.fleet.joining``, and has its name here:
docs/decisions/0034 says why.
``VirtualConnectorClient`` is for a program that carries a planner's decisions out.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaplan.fleet.joining import connect
    from dynaplan.planner.virtual.client import VirtualConnectorClient

__all__ = ["VirtualConnectorClient", "connect"]

_HOMES = {
    "VirtualConnectorClient": "dynaplan.planner.virtual.client",
    "connect": "dynaplan.fleet.joining",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
