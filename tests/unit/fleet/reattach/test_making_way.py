"""A ``serve`` makes way for another version if it may, and one that takes over is the one that was meant."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import dynaplan
from dynaplan.fleet.reattach.making_way import PACKAGE_VARIABLE, check_own_package, make_way, request
from dynaplan.util.errors import DeploymentError

TOKEN = "a-token-of-the-deployment"
PROGRAM = ["/new/bin/python", "-P", "-m", "dynaplan", "serve"]
PACKAGE = str(Path(dynaplan.__file__).resolve().parent)


class Link:
    def __init__(self) -> None:
        self.next: tuple[list[str], dict[str, str]] | None = None

    def make_way_for(self, command: list[str], variables: dict[str, str]) -> None:
        self.next = command, variables


def test_the_next_serve_has_the_new_program_and_the_old_arguments() -> None:
    link: Any = Link()
    asked = request(PROGRAM, {"PYTHONPATH": f"modules{os.pathsep}/opt", "HOME": "/x"}, TOKEN)
    assert make_way(link, ["graph", "--port", "0"], TOKEN, asked) == ""
    path = f"{Path.cwd() / 'modules'}{os.pathsep}/opt"
    expected = {PACKAGE_VARIABLE: PACKAGE, "PYTHONPATH": path}
    assert link.next == ([*PROGRAM, "graph", "--port", "0"], expected)


@pytest.mark.parametrize("token", ["", "another", None, 7])
def test_nobody_without_the_token_chooses_a_program(token: object) -> None:
    link: Any = Link()
    asked = {**request(PROGRAM, {}, ""), "token": token}
    assert "token" in make_way(link, [], TOKEN, asked)
    assert "token" in make_way(link, [], "", asked)
    assert link.next is None


@pytest.mark.parametrize(
    "change", [{"program": None}, {"program": [1]}, {"variables": []}, {"variables": {"A": 1}}]
)
def test_a_request_of_another_form_is_refused(change: dict[str, Any]) -> None:
    link: Any = Link()
    assert "expected" in make_way(link, [], TOKEN, {**request(PROGRAM, {}, TOKEN), **change})
    assert link.next is None


def test_without_a_holder_there_is_nobody_to_start_another() -> None:
    assert "--no-supervise" in make_way(None, [], TOKEN, request(PROGRAM, {}, TOKEN))


def test_a_package_that_was_not_meant_does_not_take_over() -> None:
    meant = {PACKAGE_VARIABLE: PACKAGE}
    check_own_package(meant, is_trial=True)
    assert meant == {}
    check_own_package({PACKAGE_VARIABLE: "/other"}, is_trial=False)
    with pytest.raises(DeploymentError, match="/other is to take over"):
        check_own_package({PACKAGE_VARIABLE: "/other"}, is_trial=True)
