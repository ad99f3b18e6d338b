"""``dynaplan ui`` prints the address that signs a browser in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from dynaplan.cli import ui
from dynaplan.cli.main import group
from dynaplan.contract.page_access import page_token


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(namespace="ns", frontend_url="http://127.0.0.1:8000")
    monkeypatch.setattr(ui, "connect", lambda namespace: found)


def test_the_address_has_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAPLAN_WORKER_TOKEN", "secret")
    printed = CliRunner().invoke(group, ["ui"]).output
    assert printed == f"http://127.0.0.1:8000/ui?token={page_token('secret')}\n"


def test_without_a_token_there_is_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAPLAN_WORKER_TOKEN", raising=False)
    assert "has no token" in str(CliRunner().invoke(group, ["ui"]).exception)
