"""The model, and a deployment of each graph that serves it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynaplan.engines.pulled_models import CATALOGUE, models_dir, pull
from dynaplan.util.errors import TemporaryError
from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import aggregated, disaggregated


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M-Instruct; kept in the environment that the tests run in."""
    try:
        return pull(CATALOGUE["smollm2"], models_dir({"XDG_CACHE_HOME": str(Path(sys.prefix) / "cache")}))
    except TemporaryError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def one_pool(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Deployment]:
    with aggregated(tmp_path_factory.mktemp("agg"), model) as deployment:
        yield deployment.start()


@pytest.fixture(scope="module")
def two_pools(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Deployment]:
    with disaggregated(tmp_path_factory.mktemp("disagg"), model) as deployment:
        yield deployment.start()
