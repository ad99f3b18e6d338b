"""Looks at a deployment for its web page: ``python -m dynaplan.cli.ui.feed NAMESPACE PARENT_PID``.

A frontend starts it while the page is open; ``dynaplan.webui.viewers`` says what is written and read. It is
a process of its own, so that looking and drawing never hold a token up. It ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from dynaplan.cli.watching.following import Following
from dynaplan.cli.watching.view import view_of
from dynaplan.planner.rules.explaining import explain, in_one_line, is_change
from dynaplan.process.parent_death import die_with_parent
from dynaplan.util.errors import DynaplanError
from dynaplan.webui.live_charts import ChartsAsked, ChartsLimits, TimedChange, live_svg
from dynaplan.webui.samples import DeploymentSample, sample_of_look, samples_of_log, time_of
from dynaplan.webui.viewers import TROUBLE

LOOK_S = 3.0
"""Time between two looks, in seconds."""

DRAW_S = 10.0
"""Time between two drawings of the same charts, and two looks at the planner's log, in seconds."""

KEPT_S = 6 * 3600.0
"""The time of which samples are kept, in seconds: that of the longest charts."""

MOST_RECORDS = 5000
"""The most records that are read of the planner's log at first."""

HISTORY_BYTES = 32 << 20
"""The bytes at the end of a planner's log that are read at first."""

NEWEST = 12
"""Records that are read again and again; a planner decides less often than that."""

SHOWN_CHANGES, SHOWN_LAST = 30, 3
"""Decisions that the page lists: changes, and the last ones of any kind."""

Record = Mapping[str, Any]


class DecisionHistory:
    """The planner's decisions: the samples in them, and the changes.

    ``read(last, tail_bytes)`` returns the last records, oldest first.
    """

    def __init__(self, read: Callable[[int, int], Sequence[Record]]) -> None:
        self._read = read
        self._newest_s = float("-inf")
        self.samples: list[DeploymentSample] = []
        self.changes: list[TimedChange] = []
        self.listed: list[dict[str, Any]] = []

    def look(self, now_s: float) -> bool:
        """Read what is new; tell whether there was anything."""
        is_first = self._newest_s == float("-inf")
        found = self._read(*((MOST_RECORDS, HISTORY_BYTES) if is_first else (NEWEST, 1 << 20)))
        timed = [(at_s, record) for record in found if (at_s := time_of(record)) is not None]
        begin_s = now_s - KEPT_S
        new = [record for at_s, record in timed if at_s > max(self._newest_s, begin_s)]
        if not new:
            return False
        before = [record for at_s, record in timed if at_s <= self._newest_s][-1:]
        self._newest_s = max(at_s for at_s, _ in timed)
        added = list(samples_of_log([*before, *new]))[len(before) :]
        self.samples = [each for each in self.samples if each.at_s >= begin_s] + added
        changed = [record for record in new if is_change(record)]
        self.changes = [each for each in self.changes if each.at_s >= begin_s] + list(map(_change, changed))
        self._list(new)
        return True

    def _list(self, new: Sequence[Record]) -> None:
        kept = [each for each in self.listed if each["is_change"]]
        listed = [*kept, *map(_listed, [each for each in new if is_change(each)][-SHOWN_CHANGES:])]
        last = [_listed(each) for each in new[-SHOWN_LAST:] if not is_change(each)]
        self.listed = sorted([*listed[-SHOWN_CHANGES:], *last], key=lambda each: float(each["at_s"]))


def _change(record: Record) -> TimedChange:
    return TimedChange(time_of(record) or 0.0, in_one_line(record).partition("  ")[2])


def _listed(record: Record) -> dict[str, Any]:
    """Return a decision for the page's list: when, in one line, and all that ``dynaplan why`` says."""
    clock, _, text = in_one_line(record).partition("  ")
    return {
        "at_s": time_of(record),
        "time": clock,
        "text": text,
        "why": explain(record),
        "is_change": is_change(record),
    }


class PageFeed:
    """Looks, draws and writes: one process's work. ``write(name, text)`` writes an event."""

    def __init__(
        self,
        following: Following,
        read: Callable[[int, int], Sequence[Record]],
        write: Callable[[str, str], None],
    ) -> None:
        self._following = following
        self._history = DecisionHistory(read)
        self._write = write
        self._seen: list[DeploymentSample] = []
        self._drawn_s: dict[ChartsAsked, float] = {}
        self._drawn_at_s = float("-inf")
        self._document: dict[str, Any] = {}
        self.asked: list[ChartsAsked] = []
        self.woken = asyncio.Event()

    async def run(self) -> None:
        """Look until this is cancelled. Raises DeploymentError when the deployment ends."""
        while True:
            begun_s = time.monotonic()
            self._document = await self._following.look()
            notes = view_of(self._document, time.time()).notes
            self._write("look", json.dumps({**self._document, "notes": notes}, separators=(",", ":")))
            if begun_s - self._drawn_at_s >= DRAW_S:
                self._drawn_at_s = begun_s
                now_s = time.time()
                self._seen = [each for each in self._seen if each.at_s >= now_s - KEPT_S]
                self._seen.append(sample_of_look(self._document, now_s, DRAW_S))
                if self._history.look(now_s):
                    self._write("decisions", json.dumps(self._history.listed[::-1], separators=(",", ":")))
            self._draw()
            await self._pause(begun_s + LOOK_S)

    def ask(self, line: bytes) -> None:
        """Note which charts are shown; what cannot be read changes nothing."""
        try:
            self.asked = [ChartsAsked(int(span_s), int(width)) for span_s, width in json.loads(line)]
        except (ValueError, TypeError):
            return
        self.woken.set()

    async def _pause(self, until_s: float) -> None:
        """Wait for the next look; draw at once what is asked for meanwhile."""
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                while True:
                    await self.woken.wait()
                    self.woken.clear()
                    self._draw()
        except TimeoutError:
            pass

    def _draw(self) -> None:
        """Draw the charts that are shown and are not newer than the samples."""
        self._drawn_s = {each: drawn_s for each, drawn_s in self._drawn_s.items() if each in self.asked}
        for each in self.asked:
            if self._drawn_s.get(each, float("-inf")) < self._drawn_at_s:
                self._drawn_s[each] = self._drawn_at_s
                self._write(each.name, self._drawing(each))

    def _drawing(self, asked: ChartsAsked) -> str:
        document, now = self._document, datetime.now().astimezone()
        limits = ChartsLimits(
            document.get("targets") or {},
            len(document.get("gpus", ())),
            any(row["role"] == "prefill" for row in document["workers"]),
        )
        offset = now.utcoffset()
        return live_svg(
            asked,
            sorted([*self._history.samples, *self._seen], key=lambda each: each.at_s),
            self._history.changes,
            limits,
            now.timestamp(),
            offset.total_seconds() if offset else 0.0,
        )


async def _run(namespace: str) -> None:
    from dynaplan.planner import factory

    following = Following(namespace)
    planner_dir = following.found.log_dir / "planner"
    feed = PageFeed(
        following,
        lambda last, tail_bytes: factory.recent_decisions(planner_dir, last, tail_bytes),
        _print,
    )
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    looking = asyncio.create_task(feed.run())
    try:
        listening = asyncio.create_task(_listen(reader, feed))
        done, _ = await asyncio.wait({looking, listening}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if looking in done:
            looking.result()
    finally:
        looking.cancel()
        await asyncio.wait({looking})
        await following.close()


async def _listen(reader: asyncio.StreamReader, feed: PageFeed) -> None:
    while line := await reader.readline():
        feed.ask(line)


def _print(name: str, text: str) -> None:
    sys.stdout.write(f"{name}\t{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Look at the deployment of the namespace in the arguments until the input ends; return the exit code."""
    namespace, parent_pid = arguments
    die_with_parent(int(parent_pid))
    try:
        asyncio.run(_run(namespace))
    except DynaplanError as error:
        _print(TROUBLE, json.dumps(str(error.args[0])))
        return 1
    except (BrokenPipeError, KeyboardInterrupt):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
