"""Graph modules that a test writes, and a process without a configuration: a plugin of pytest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from dynaplan.sdk import ServiceConfig

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a file below ``tmp_path``; modules imported during the test are forgotten after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write_file(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
        return file

    yield write_file
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def no_configuration(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin and end the test without a configuration in the environment."""
    monkeypatch.delenv("DYNAMO_SERVICE_CONFIG", raising=False)
    monkeypatch.delenv("DYN_DEPLOYMENT_CONFIG", raising=False)
    ServiceConfig.reset()
    yield
    ServiceConfig.reset()
