"""``dynaplan doctor`` as a user types it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from dynaplan.cli.box import findings
from dynaplan.cli.box.doctor import command, page
from dynaplan.cli.box.findings import Finding, Level

FINDINGS = (
    Finding(Level.OK, "port", "8000 is free"),
    Finding(Level.WARNING, "shared memory", "small", "Make it larger."),
    Finding(Level.FAULT, "etcd", "there is none", "Install one."),
)


def with_checks(monkeypatch: pytest.MonkeyPatch, *found: Finding) -> None:
    def check() -> Iterator[Finding]:
        yield from found

    monkeypatch.setattr(findings, "CHECKS", (check,))


def test_a_finding_stands_with_what_to_do_next_below_it() -> None:
    assert click.unstyle(page(FINDINGS, 0)).splitlines() == [
        "ok    port           8000 is free",
        "warn  shared memory  small",
        "                     -> Make it larger.",
        "FAIL  etcd           there is none",
        "                     -> Install one.",
        "",
        "`dynaplan serve` cannot work here: 1 to mend; 1 warnings.",
    ]


def test_no_line_is_wider_than_the_screen() -> None:
    found = (Finding(Level.NOTE, "topic", "many words " * 20, "and more words " * 20),)
    assert max(map(len, click.unstyle(page(found, 60)).splitlines())) <= 60


@pytest.mark.parametrize(("found", "code"), [(FINDINGS, 1), (FINDINGS[:2], 0)])
def test_the_exit_code_says_whether_serve_can_work(
    monkeypatch: pytest.MonkeyPatch, found: tuple[Finding, ...], code: int
) -> None:
    with_checks(monkeypatch, *found)
    assert CliRunner().invoke(command, [], standalone_mode=False).return_value == code


def test_json_has_every_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    with_checks(monkeypatch, *FINDINGS)
    rows = json.loads(CliRunner().invoke(command, ["--json"], standalone_mode=False).output)
    assert [row["level"] for row in rows] == ["ok", "warn", "FAIL"]
