"""Each change of an engine's option is made once, and its result gets into the store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from dynaplan.contract.option_changes import DONE, OPTION_CHANGE, OptionChange
from dynaplan.fleet.plugin import option_reloads
from dynaplan.fleet.plugin.option_reloads import OptionReloads, reload_option

CHANGE = OptionChange("VllmWorker", "max-num-seqs", 8, 16, 1.0)


class Link:
    """The plugin's link to a store that loses what is written while it ``is_away``."""

    def __init__(self, text: str) -> None:
        self.option_change = text
        self.is_away = False

    def replace(self, name: str, before: str, after: str) -> None:
        assert name == OPTION_CHANGE
        if not self.is_away and self.option_change == before:
            self.option_change = after


class Plugin:
    """A plugin that has changes made with this result."""

    def __init__(self, text: str = CHANGE.to_text(), result: str = DONE) -> None:
        self.link, self.result = Link(text), result
        self.made: list[OptionChange] = []
        self.changes = OptionReloads("ns", cast(Any, self.link), self._carry)

    async def _carry(self, namespace: str, change: OptionChange) -> str:
        self.made.append(change)
        return self.result


@pytest.mark.parametrize("result", [DONE, "1 of 2 decode workers ready"])
async def test_a_change_is_made_once_and_has_its_result(result: str) -> None:
    plugin = Plugin(result=result)
    for _ in range(3):
        await plugin.changes.poll()
    assert plugin.made == [CHANGE]
    assert OptionChange.from_text(plugin.link.option_change) == replace(CHANGE, result=result)


async def test_a_result_that_the_store_did_not_take_is_written_without_making_the_change_again() -> None:
    plugin = Plugin()
    plugin.link.is_away = True
    await plugin.changes.poll()
    plugin.link.is_away = False
    await plugin.changes.poll()
    assert plugin.made == [CHANGE]
    assert OptionChange.from_text(plugin.link.option_change).result == DONE


async def test_the_next_change_is_made_too() -> None:
    plugin = Plugin()
    await plugin.changes.poll()
    back = CHANGE.reversed(2.0)
    plugin.link.option_change = back.to_text()
    await plugin.changes.poll()
    assert plugin.made == [CHANGE, back]


@pytest.mark.parametrize("text", ["", "16", "{}", '{"component": "VllmWorker", "option": 3}'])
async def test_what_is_no_change_is_left_alone(text: str) -> None:
    plugin = Plugin(text)
    await plugin.changes.poll()
    assert plugin.made == []
    assert plugin.link.option_change == text


@pytest.mark.parametrize(
    ("program", "result"),
    [
        ("print('reloaded')", DONE),
        ("import sys; sys.exit('careful\\nError: it is 9')", "it is 9"),
        ("import sys; sys.exit('Error: it does not start\\nits log\\n  a hint')", "it does not start"),
        ("import sys; sys.exit(3)", "exit code 3"),
    ],
)
async def test_the_result_is_what_the_command_says(
    monkeypatch: pytest.MonkeyPatch, program: str, result: str
) -> None:
    start = option_reloads.start_process

    async def started(*command: str, **options: Any) -> Any:
        assert command[4:7] == ("reload", "ns", "--yes")
        assert OptionChange.from_text(command[-1]) == CHANGE
        return await start(command[0], "-c", program, **options)

    monkeypatch.setattr(option_reloads, "start_process", started)
    assert await reload_option("ns", CHANGE) == result
