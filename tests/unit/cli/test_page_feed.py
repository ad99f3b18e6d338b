"""The process behind the page: what it writes of a deployment, how often it draws, and what it remembers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.cli import page_feed as module
from dynaplan.cli.page_feed import HISTORY_S, DecisionHistory, PageFeed
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.planner.model import DecisionRecord, PlannerState
from dynaplan.planner.recorders.manual_changes import ManualChange
from dynaplan.planner.rules.decision import decide
from dynaplan.webui.charts import ChartsRequest
from tests.unit.cli.status_documents import FIGURES, document, worker_document
from tests.unit.planner.rules.situations import interval

NOW_S = 1_800_000_000.0
SMALL = ChartsRequest(900, 380)


def record(ago_s: float, *, is_change: bool) -> dict[str, Any]:
    """A line of the planner's log, written that long ago."""
    settings = PlannerSettings()
    observation = interval(1, 1, 0.95 if is_change else 0.7)
    next_state, decision = decide(settings, PlannerState(), observation)
    wall_time = datetime.fromtimestamp(NOW_S - ago_s, UTC).isoformat()
    found = DecisionRecord(wall_time, settings, PlannerState(), observation, decision, next_state)
    return json.loads(json.dumps(found.to_json()))


def history(records: list[dict[str, Any]], model: str = "") -> DecisionHistory:
    return DecisionHistory(lambda last, tail_bytes: records[-last:], NOW_S - HISTORY_S, model)


def test_history_is_read_from_the_log_once_and_then_what_is_new() -> None:
    records = [record(60, is_change=False), record(30, is_change=True)]
    read = history(records)
    assert read.poll(NOW_S)
    assert not read.poll(NOW_S)
    records.append(record(0, is_change=False))
    assert read.poll(NOW_S)
    assert [round(NOW_S - each.at_s) for each in read.samples] == [60, 30, 0]
    assert [each.lasted_s for each in read.samples] == [600.0, 30.0, 30.0], "the most that one speaks for"
    assert [NOW_S - each.at_s for each in read.changes] == [30.0]
    assert read.changes[0].text.startswith("changed prefill 1, decode 1 -> prefill 1, decode 2: ")


def test_what_is_older_than_the_longest_charts_is_let_go() -> None:
    records = [record(HISTORY_S + 10, is_change=True), record(10, is_change=True)]
    read = history(records)
    read.poll(NOW_S)
    assert len(read.samples) == len(read.changes) == 1
    records.append(record(-HISTORY_S, is_change=False))
    read.poll(NOW_S + HISTORY_S)
    assert len(read.samples) == 1
    assert read.changes == []


def test_changes_are_listed_with_all_that_why_says_and_of_the_rest_the_last() -> None:
    records = [record(100 - each, is_change=each % 5 == 0) for each in range(50)]
    read = history(records)
    read.poll(NOW_S)
    assert [each["is_change"] for each in read.listed].count(True) == 10
    assert [each["is_change"] for each in read.listed].count(False) == module.SHOWN_LAST
    assert "observed" in read.listed[-1]["why"]
    assert read.listed[-1]["time"]
    assert read.listed == sorted(read.listed, key=lambda each: each["at_s"])


def test_of_a_model_the_decisions_bear_its_name_and_its_workers_are_no_sample_of_the_deployment() -> None:
    read = history([record(60, is_change=False), record(30, is_change=True)], "ant")
    assert read.poll(NOW_S)
    assert read.samples == []
    assert read.changes[0].text.startswith("ant: changed prefill 1, decode 1 -> ")
    assert [each["text"].partition(":")[0] for each in read.listed] == ["ant", "ant"]


class Looks:
    """A deployment that looks the same at each poll; copies ``StatusPoller``."""

    def __init__(self, *histories: dict[str, Any]) -> None:
        self.looks = self.asked = 0
        self.histories = list(histories)
        self.planned_models: dict[str, Any] = {}
        self.found = SimpleNamespace(began_s=0.0)

    async def load_histories(self) -> list[dict[str, Any]]:
        self.asked += 1
        return self.histories

    async def poll(self) -> dict[str, Any]:
        self.looks += 1
        prefill = worker_document("p", role="prefill", state="backoff", reason="it crashed")
        return document(worker_document(), prefill, load=FIGURES, planned_models=self.planned_models)


def no_records(component: str, last: int, tail_bytes: int) -> Sequence[dict[str, Any]]:
    return []


def nothing_by_hand(last: int) -> Sequence[ManualChange]:
    return []


def page_feed() -> PageFeed:
    return PageFeed(Looks(), no_records, nothing_by_hand)  # type: ignore[arg-type]


async def test_looks_have_the_sentences_of_top() -> None:
    (name, text), _ = await page_feed().events([])
    look = json.loads(text)
    assert name == "look"
    assert look["workers"][0]["worker"] == "dynamo_VllmWorker"
    assert "p: it crashed" in look["notes"]


async def test_only_charts_that_are_shown_are_drawn_and_at_once() -> None:
    feed = page_feed()
    assert [name for name, _ in await feed.events([])] == ["look", "decisions"]
    assert [name for name, _ in await feed.events([SMALL])] == [SMALL.name]
    assert await feed.events([SMALL]) == []


async def test_charts_are_drawn_again_when_there_is_more_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEPLOYMENT_POLL_S", 0.0)
    monkeypatch.setattr(module, "DRAW_S", 0.0)
    drawing = page_feed()
    await drawing.events([])
    for _ in range(3):
        assert [name for name, _ in await drawing.events([SMALL])] == ["look", SMALL.name]


async def test_new_decisions_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEPLOYMENT_POLL_S", 0.0)
    monkeypatch.setattr(module, "DRAW_S", 0.0)
    monkeypatch.setattr(module.time, "time", lambda: NOW_S)
    records = [record(10, is_change=True)]
    looks: Any = Looks()
    feed = PageFeed(looks, lambda component, last, tail_bytes: records, nothing_by_hand)
    assert [name for name, _ in await feed.events([])] == ["look", "decisions"]
    assert [name for name, _ in await feed.events([])] == ["look"]


async def test_the_decisions_of_every_planned_model_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "time", lambda: NOW_S)
    logs = {"ant": [record(10, is_change=True)], "b-2": [record(20, is_change=True)]}
    looks: Any = Looks()
    looks.planned_models = {
        name: {"component": component, "policy": "load", "targets": None}
        for name, component in {"ant": "ant", "b/2": "b-2"}.items()
    }
    feed = PageFeed(looks, lambda component, last, tail_bytes: logs[component], nothing_by_hand)
    events = dict(await feed.events([]))
    listed = json.loads(events["decisions"])
    assert [each["text"].partition(": ")[0] for each in listed] == ["ant", "b/2"]


async def test_where_there_is_no_decision_the_page_is_told_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEPLOYMENT_POLL_S", 0.0)
    monkeypatch.setattr(module, "DRAW_S", 0.0)
    feed = page_feed()
    assert (await feed.events([]))[1] == ("decisions", "[]")
    assert [name for name, _ in await feed.events([])] == ["look"]


async def test_what_frontends_have_kept_is_read_until_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEPLOYMENT_POLL_S", 0.0)
    monkeypatch.setattr(module, "DRAW_S", 0.0)
    poller = Looks()
    feed = PageFeed(poller, no_records, nothing_by_hand)  # type: ignore[arg-type]
    await feed.events([])
    poller.histories = [{"bounds_s": {}, "steps": []}]
    await feed.events([])
    await feed.events([])
    assert poller.asked == 2


async def test_what_a_person_changed_is_a_decision_of_the_list_and_a_mark_in_the_charts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.time, "time", lambda: NOW_S)
    looks: Any = Looks()
    records, by_hand = [record(10, is_change=True)], [ManualChange(NOW_S - 5, "alice", "decode 4 -> 2")]
    feed = PageFeed(looks, lambda component, last, tail_bytes: records, lambda last: by_hand)
    listed = json.loads(dict(await feed.events([]))["decisions"])
    whole = ["changed prefill 1, decode 1 -> prefill 1, decode 2", "by hand (alice): decode 4 -> 2"]
    for found in ([each["text"] for each in reversed(listed)], [each.text for each in feed.changes]):
        assert [text.startswith(start) for text, start in zip(found, whole, strict=True)] == [True, True]
