"""The events of circus: none of them is lost while the plugin starts."""

from __future__ import annotations

import json
from typing import Any, cast
from unittest import mock

import pytest

from dynaplan.fleet.circus_client import REPLACE_EVENT, CircusClient
from dynaplan.fleet.plugin import plugin
from dynaplan.fleet.plugin.plugin import ReconcilerPlugin
from dynaplan.fleet.plugin.reconciler import Reconciler
from dynaplan.util.errors import ArbiterBusy


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> ReconcilerPlugin:
    """A plugin that hears events and has not opened the fleet yet."""
    monkeypatch.setenv("DYNAPLAN_PARENT_PID", "1")
    monkeypatch.setattr(plugin, "die_with_parent", lambda pid: None)
    return ReconcilerPlugin("ipc://commands", "ipc://events", 1.0)


def published(action: str, **event: Any) -> list[bytes]:
    """An event as circus publishes it."""
    return [f"watcher.dynamo_vllmworker.{action}".encode(), json.dumps(event).encode()]


async def test_exits_before_the_plugin_listened_are_asked_for_and_a_busy_circus_harms_nothing() -> None:
    circus, reconciler = mock.create_autospec(CircusClient), mock.create_autospec(Reconciler, instance=True)
    circus.exit_codes.side_effect = [{41: 78}, ArbiterBusy("circus stays busy")]
    for _ in range(2):
        await plugin.record_earlier_exits(circus, reconciler)
    reconciler.record_exit.assert_called_once_with(41, 78)


def test_exits_while_the_plugin_starts_reach_the_reconciler_once(starting: ReconcilerPlugin) -> None:
    starting.handle_recv(published("reap", process_pid=41, exit_code=-9))
    starting.handle_recv(published(REPLACE_EVENT, name="dynamo_VllmWorker"))
    reconciler = mock.create_autospec(Reconciler, instance=True)
    starting.pass_events_to(cast(Reconciler, reconciler))
    starting.handle_recv(published("reap", process_pid=42, exit_code=1))
    assert reconciler.record_exit.call_args_list == [mock.call(41, -9), mock.call(42, 1)]
    reconciler.request_replacement.assert_called_once_with("dynamo_VllmWorker")
