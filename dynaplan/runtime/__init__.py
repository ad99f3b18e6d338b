"""The distributed runtime: what every process of a deployment uses, a user's own included.

``connect`` joins a deployment. It is made in ``dynaplan.joining``, which may name the adapters, and has its
name here: docs/decisions/0034 says why.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaplan.joining.connecting import connect

__all__ = ["connect"]


def __getattr__(name: str) -> Any:
    if name == "connect":
        from dynaplan.joining.connecting import connect

        return connect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
