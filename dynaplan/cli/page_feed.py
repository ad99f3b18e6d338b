"""Polls a deployment for its web page: a helper process (``dynaplan.process.helper``), argument NAMESPACE.

A frontend starts it while the page is open; ``dynaplan.webui.sse_clients`` has its question and answer. It is
a process of its own, so that polling and drawing never hold a token up.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from dynaplan.cli.load_past import samples_of_histories
from dynaplan.cli.models_view import event_line
from dynaplan.cli.running_deployment import manual_changes_of
from dynaplan.cli.status_poller import StatusPoller
from dynaplan.cli.status_view import view_of
from dynaplan.contract.model_keys import ModelEvent
from dynaplan.planner.recorders.manual_changes import ManualChange
from dynaplan.planner.rules.explain import explain, is_change, summarize
from dynaplan.process.helper_main import Channel, become_helper
from dynaplan.util.durations import local_time
from dynaplan.util.errors import DynaplanError
from dynaplan.webui.charts import (
    ChartLimits,
    ChartsRequest,
    DeploymentSample,
    TimedChange,
    live_svg,
    record_time_s,
    sample_of_status,
    samples_of_log,
)

DEPLOYMENT_POLL_S = 2.5
"""Least seconds between two polls of the deployment; a question in between only draws what is known."""

DRAW_S = 10.0
"""Seconds between two drawings of the same charts, and between two reads of the planner's log."""

HISTORY_S = 6 * 3600.0
"""The time of which samples are kept, in seconds: that of the longest charts."""

MAX_RECORDS = 5000
"""The most records that are read of the planner's log at first."""

HISTORY_BYTES = 32 << 20
"""The bytes at the end of a planner's log that are read at first."""

RECENT_RECORDS = 12
"""Records that are read again and again; a planner decides less often than that."""

SHOWN_CHANGES, SHOWN_LAST = 30, 3
"""Decisions that the page lists: changes, and the last ones of any kind."""

Record = Mapping[str, Any]


class DecisionHistory:
    """A planner's decisions: the changes, and the samples in them where it plans for all workers.

    ``read(last, tail_bytes)`` returns the last records, oldest first; ``began_s`` is the deployment's start.
    ``model`` is the one of several that it plans for, empty where it is all workers.
    """

    def __init__(self, read: Callable[[int, int], Sequence[Record]], began_s: float, model: str = "") -> None:
        self._read = read
        self._began_s = began_s
        self._of_model = f"{model}: " if model else ""
        self._newest_s = float("-inf")
        self.samples: list[DeploymentSample] = []
        self.changes: list[TimedChange] = []
        self.listed: list[dict[str, Any]] = []

    def poll(self, now_s: float) -> bool:
        """Read the new records; return whether there were any."""
        is_first = self._newest_s == float("-inf")
        found = self._read(*((MAX_RECORDS, HISTORY_BYTES) if is_first else (RECENT_RECORDS, 1 << 20)))
        timed = [(at_s, record) for record in found if (at_s := record_time_s(record)) is not None]
        begin_s = now_s - HISTORY_S
        new = [record for at_s, record in timed if at_s > max(self._newest_s, begin_s)]
        if not new:
            return False
        before = [record for at_s, record in timed if at_s <= self._newest_s][-1:]
        self._newest_s = max(at_s for at_s, _ in timed)
        if not self._of_model:
            added = list(samples_of_log([*before, *new], self._began_s))[len(before) :]
            self.samples = [each for each in self.samples if each.at_s >= begin_s] + added
        changed = [record for record in new if is_change(record)]
        self.changes = [each for each in self.changes if each.at_s >= begin_s]
        self.changes += [TimedChange(record_time_s(each) or 0.0, self._summary(each)[1]) for each in changed]
        self._list(new)
        return True

    def _list(self, new: Sequence[Record]) -> None:
        kept = [each for each in self.listed if each["is_change"]]
        changed = [each for each in new if is_change(each)][-SHOWN_CHANGES:]
        listed = [*kept, *map(self._listed, changed)]
        last = [self._listed(each) for each in new[-SHOWN_LAST:] if not is_change(each)]
        self.listed = sorted([*listed[-SHOWN_CHANGES:], *last], key=lambda each: float(each["at_s"]))

    def _listed(self, record: Record) -> dict[str, Any]:
        """Return a decision for the page's list: when, in one line, and all that ``dynaplan why`` prints."""
        clock, text = self._summary(record)
        return {
            "at_s": record_time_s(record),
            "time": clock,
            "text": text,
            "why": explain(record),
            "is_change": is_change(record),
        }

    def _summary(self, record: Record) -> tuple[str, str]:
        """Return the time of a decision, and the model with the decision and its reason."""
        clock, _, text = summarize(record).partition("  ")
        return clock, self._of_model + text


def _listed_move(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was decided about a model that is loaded on request, as a decision of the page's list."""
    line = event_line(ModelEvent(**event))
    when, _, text = line.partition("  ")
    return {"at_s": event["at_unix_s"], "time": when[-8:], "text": text, "why": line, "is_change": True}


def _listed_by_hand(change: ManualChange) -> dict[str, Any]:
    """Return what a person has changed as a decision of the page's list."""
    line = f"{local_time(change.at_unix_s)}  {change}"
    return {
        "at_s": change.at_unix_s,
        "time": line[11:19],
        "text": str(change),
        "why": line,
        "is_change": True,
    }


class PageFeed:
    """Polls the deployment's status and the planners' logs, and draws the charts of the pages that are open.

    ``read(component, number, tail_bytes)`` returns the latest records of one planner, oldest first.
    ``component`` is that of the model that the planner plans for, "" for the planner of a graph.
    ``read_manual(number)`` returns the latest changes by hand.
    """

    def __init__(
        self,
        poller: StatusPoller,
        read: Callable[[str, int, int], Sequence[Record]],
        read_manual: Callable[[int], Sequence[ManualChange]],
    ) -> None:
        self._poller = poller
        self._read = read
        self._read_manual = read_manual
        self._moves: dict[tuple[float, str], TimedChange] = {}
        self._histories: dict[str, DecisionHistory] = {}
        self._listed: list[dict[str, Any]] | None = None
        self._has_past = False
        self._past: list[DeploymentSample] = []
        self._seen: list[DeploymentSample] = []
        self._drawn_s: dict[ChartsRequest, float] = {}
        self._looked_at_s = self._drawn_at_s = float("-inf")
        self._document: dict[str, Any] = {}

    async def events(self, shown: Sequence[ChartsRequest]) -> list[tuple[str, str]]:
        """Return what is new for pages with these charts. Raises DeploymentError when the deployment ends."""
        begun_s, found = time.monotonic(), []
        if begun_s - self._looked_at_s >= DEPLOYMENT_POLL_S:
            self._looked_at_s = begun_s
            self._document = await self._poller.poll()
            view = view_of(self._document, time.time())
            shown_lines = {"notes": view.notes, "planners": view.planners}
            found.append(("look", json.dumps({**self._document, **shown_lines}, separators=(",", ":"))))
            if begun_s - self._drawn_at_s >= DRAW_S:
                self._drawn_at_s = begun_s
                await self._read_past()
                found += self._sampled(time.time())
        return found + self._drawn(shown)

    async def _read_past(self) -> None:
        """Read the load that the frontends have recorded, once; the next call tries again if none answers."""
        if not self._has_past and (histories := await self._poller.load_histories()):
            self._has_past = True
            self._past = samples_of_histories(histories, time.time())

    def _sampled(self, now_s: float) -> list[tuple[str, str]]:
        """Add a sample of the status to the history; return the event with the decisions, if any are new."""
        self._seen = [each for each in self._seen if each.at_s >= now_s - HISTORY_S]
        self._seen.append(sample_of_status(self._document, now_s, DRAW_S))
        for model, planned in (self._document.get("planned_models") or {"": {"component": ""}}).items():
            read, began_s = partial(self._read, planned["component"]), self._poller.found.began_s
            self._histories.setdefault(model, DecisionHistory(read, began_s, model)).poll(now_s)
        others = list(map(_listed_move, self._document.get("model_events", ())))
        others += map(_listed_by_hand, self._read_manual(SHOWN_CHANGES))
        self._mark(others, now_s)
        decided = [row for each in self._histories.values() for row in each.listed]
        listed = sorted([*decided, *others], key=lambda each: float(each["at_s"]), reverse=True)
        if listed == self._listed:
            return []
        self._listed = listed
        return [("decisions", json.dumps(listed, separators=(",", ":")))]

    def _mark(self, rows: Sequence[Mapping[str, Any]], now_s: float) -> None:
        """Keep changes by hand and of models for the charts' marks, longer than the page's lists do."""
        self._moves |= {(row["at_s"], row["text"]): TimedChange(row["at_s"], row["text"]) for row in rows}
        self._moves = {key: each for key, each in self._moves.items() if each.at_s >= now_s - HISTORY_S}

    def _drawn(self, shown: Sequence[ChartsRequest]) -> list[tuple[str, str]]:
        """Return an event with each shown chart that is due; one is drawn once in ``DRAW_S`` seconds."""
        self._drawn_s = {each: drawn_s for each, drawn_s in self._drawn_s.items() if each in shown}
        due = [each for each in shown if self._drawn_s.get(each, float("-inf")) < self._drawn_at_s]
        self._drawn_s |= dict.fromkeys(due, self._drawn_at_s)
        return [(each.name, self._drawing(each)) for each in due]

    @property
    def changes(self) -> list[TimedChange]:
        """All that changed something: by the planners, by hand, and of models; the marks in the charts."""
        decided = [change for each in self._histories.values() for change in each.changes]
        return sorted([*decided, *self._moves.values()], key=lambda each: each.at_s)

    def _drawing(self, asked: ChartsRequest) -> str:
        document, now = self._document, datetime.now().astimezone()
        limits = ChartLimits(
            document.get("slo") or {},
            len(document.get("gpus", ())),
            any(row["role"] == "prefill" for row in document["workers"]),
            document.get("kv_scale_up_threshold"),
            is_by_model=bool(document.get("on_request")),
        )
        offset = now.utcoffset()
        logged = [sample for each in self._histories.values() for sample in each.samples]
        return live_svg(
            asked,
            sorted([*logged, *self._past, *self._seen], key=lambda each: each.at_s),
            self.changes,
            limits,
            now.timestamp(),
            offset.total_seconds() if offset else 0.0,
        )


async def _run(namespace: str, channel: Channel) -> None:
    from dynaplan.planner.recorders.decision_log import recent_records

    poller = StatusPoller(namespace)
    planner_dir, began_s = poller.found.log_dir / "planner", poller.found.began_s

    def read(component: str, last: int, tail_bytes: int) -> Sequence[Record]:
        return recent_records(planner_dir / component, last, tail_bytes, began_s)

    feed = PageFeed(poller, read, partial(manual_changes_of, poller.found))
    try:
        while question := await asyncio.to_thread(channel.read):
            shown = [ChartsRequest(int(span_s), int(width)) for span_s, width in question[0]["charts"]]
            channel.answer({"events": await feed.events(shown)})
    finally:
        await poller.close()


def main(arguments: Sequence[str]) -> int:
    """Check the deployment of the namespace in the arguments; return the exit code."""
    channel, (namespace,) = become_helper(arguments)
    try:
        asyncio.run(_run(namespace, channel))
    except DynaplanError as error:
        channel.answer({"error": str(error.args[0])})
        return 1
    except (BrokenPipeError, KeyboardInterrupt):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
