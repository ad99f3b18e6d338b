"""The distributed runtime: what every process of a deployment uses, a user's own included.

``connect`` joins a deployment, and ``dynamo_worker`` does it for a program of the original's kind. They are
made in ``dynaplan.joining``, and have their names here: docs/decisions/0034 says why.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaplan.joining import connect, dynamo_worker

__all__ = ["connect", "dynamo_worker"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from dynaplan import joining

        return getattr(joining, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
