"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import Deployment


@pytest.fixture
def deploy(tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    """Start deployments; on the way out nothing of any of them may be left."""
    deployments: list[Deployment] = []

    def start(*arguments: Any, wait: bool = True, **keywords: Any) -> Deployment:
        deployment = Deployment(tmp_path, *arguments, **keywords)
        deployments.append(deployment)
        if wait:
            deployment.start()
        else:
            deployment.spawn()
        return deployment

    yield start
    for deployment in deployments:
        deployment.close()
