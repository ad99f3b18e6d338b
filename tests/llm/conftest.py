"""The model, and a deployment of each graph that serves it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import aggregated, disaggregated
from tests.llm.fetch import NotFetched, smollm2


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M-Instruct; kept in the environment that the tests run in."""
    try:
        return smollm2(Path(sys.prefix) / "models")
    except NotFetched as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def one_pool(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Deployment]:
    deployment = aggregated(tmp_path_factory.mktemp("agg"), model)
    try:
        yield deployment.start()
    finally:
        deployment.close()


@pytest.fixture(scope="module")
def two_pools(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Deployment]:
    deployment = disaggregated(tmp_path_factory.mktemp("disagg"), model)
    try:
        yield deployment.start()
    finally:
        deployment.close()
