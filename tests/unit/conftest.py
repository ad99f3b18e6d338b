"""A unit test knows nothing of the environment that it runs in."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_configuration(no_configuration: None) -> None:
    """Keep a configuration in the environment from every unit test."""
