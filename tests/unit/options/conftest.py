"""The fixtures of tests that write graph modules."""

from __future__ import annotations

from tests.fakes.graph_files import _no_configuration, write

__all__ = ["_no_configuration", "write"]
