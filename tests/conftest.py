"""What every test session needs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fakes import tiny_models


def pytest_configure() -> None:
    # pytest-asyncio asks for the current event loop, which makes one that nobody closes, unless it was set.
    asyncio.set_event_loop(None)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF model of 1.5 MB that llama.cpp loads in 20 ms."""
    pytest.importorskip("gguf")
    return tiny_models.tiny_gguf(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face model directory without weights, for ``--load-format dummy``."""
    return tiny_models.tiny_hf(tmp_path_factory.mktemp("hf"))
