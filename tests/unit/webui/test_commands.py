"""An action of the page is one of a few commands, and nothing that a request says becomes an option."""

from __future__ import annotations

from typing import Any

import pytest

from dynaplan.webui.commands import arguments_of, called


@pytest.mark.parametrize(
    ("action", "arguments"),
    [
        ({"do": "scale", "role": "decode", "by": 1}, ["scale", "decode=+1", "--no-wait"]),
        ({"do": "scale", "role": "prefill", "by": -1}, ["scale", "prefill=-1", "--no-wait"]),
        ({"do": "hold", "role": "decode"}, ["scale", "decode=+0", "--hold", "--no-wait"]),
        ({"do": "release", "role": "decode"}, ["release", "decode"]),
        (
            {"do": "drain", "role": "decode", "worker": "ns_VllmWorker_1"},
            ["scale", "decode=-1", "--leaving", "ns_VllmWorker_1", "--no-wait"],
        ),
        ({"do": "restart", "worker": "ns_VllmWorker"}, ["restart", "ns_VllmWorker"]),
    ],
)
def test_each_action_is_a_command(action: dict[str, Any], arguments: list[str]) -> None:
    assert arguments_of(action) == arguments


@pytest.mark.parametrize(
    "action",
    [
        {},
        {"do": "stop"},
        {"do": "scale", "role": "decode", "by": 5},
        {"do": "scale", "role": "frontend", "by": 1},
        {"do": "scale", "role": "decode", "by": "1"},
        {"do": "hold", "role": "--help"},
        {"do": "release", "role": None},
        {"do": "restart", "worker": "--namespace"},
        {"do": "restart", "worker": "a/b"},
        {"do": "restart", "worker": "a\n"},
        {"do": "drain", "role": "decode", "worker": ["x"]},
        {"do": "drain", "worker": "x"},
    ],
    ids=str,
)
def test_anything_else_is_none(action: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no such action"):
        arguments_of(action)


async def test_what_a_command_writes_is_returned_its_errors_too() -> None:
    assert "No such command" in await called(["no-such-command"])
