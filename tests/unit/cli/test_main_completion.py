"""Shells complete what is typed: commands, those of a group, options and their values."""

from __future__ import annotations

import pytest
from click.shell_completion import FishComplete, ShellComplete, ZshComplete

from dynaplan.cli.main import group

VARIABLE = "_DYNAPLAN_COMPLETE"


@pytest.mark.parametrize(
    ("words", "begun", "completed"),
    [
        ([], "rel", {"release", "reload"}),
        (["export"], "s", {"schema", "systemd"}),
        (["status"], "--w", {"--watch"}),
        (["serve", "graphs.agg:Frontend", "--log-format"], "j", {"json"}),
    ],
)
def test_what_is_begun_is_completed(words: list[str], begun: str, completed: set[str]) -> None:
    completion = ShellComplete(group, {}, "dynaplan", VARIABLE)
    assert {each.value for each in completion.get_completions(words, begun)} == completed


@pytest.mark.parametrize(("shell", "call"), [(ZshComplete, "compdef"), (FishComplete, "complete ")])
def test_the_lines_of_the_guide_get_a_shells_own_words(shell: type[ShellComplete], call: str) -> None:
    source = shell(group, {}, "dynaplan", VARIABLE).source()
    assert VARIABLE in source
    assert call in source
