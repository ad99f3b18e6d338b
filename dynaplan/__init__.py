"""dynaplan: serve and scale an LLM inference graph on one multi-GPU box.

From Python: ``serve`` runs a deployment inside a ``with`` block, ``simulate`` tries policies on a trace.
"""

from __future__ import annotations

TYPE_CHECKING = False  # a process that only waits imports this package: without ``typing`` it stays small
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_PUBLIC = ("serve", "ServedDeployment", "simulate")
"""The names of ``dynaplan.cli.python_api``, imported on use."""


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dynaplan' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("dynaplan.cli.python_api"), name)
