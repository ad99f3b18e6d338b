"""A group by a table, whatever commands it has."""

from __future__ import annotations

import click
from click.testing import CliRunner

from dynaplan.cli.lazy_group import LazyGroup


@click.command(
    cls=LazyGroup,
    table={"pull": ("pull", "Fetch."), "gone": ("nowhere", "Not imported.")},
    habits={"fetch": "pull"},
)
def group() -> None:
    """Some commands."""


def test_the_help_page_is_in_the_tables_order_and_imports_nothing() -> None:
    result = CliRunner().invoke(group, ["--help"])
    assert result.output.index("pull  Fetch.") < result.output.index("gone  Not imported.")


def test_a_word_of_other_tools_is_answered_with_the_command_and_others_with_the_nearest() -> None:
    assert "No such command 'FETCH'. Did you mean 'pull'?" in CliRunner().invoke(group, ["FETCH"]).output
    assert "No such command 'pul'. Did you mean 'pull'?" in CliRunner().invoke(group, ["pul"]).output


def test_a_command_is_imported_when_it_is_used() -> None:
    assert "Usage: group pull" in CliRunner().invoke(group, ["pull", "--help"]).output
