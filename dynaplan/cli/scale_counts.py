"""Desired counts and holds in the store: written by a user's command, waited for, and the planner's part.

A start usually takes the time that was learnt of this engine, model and number of GPUs: the median of the
last five. A cold page cache or a compilation can double it, and a crash on the way starts it anew, so three
times that is waited for. A draining worker may take its whole drain deadline, and a start may need its GPUs.

The planner decides again after such a change; ``describe_next_decision`` previews when, and what.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from dynaplan.cli.running_deployment import decisions_of, service_config
from dynaplan.config.service_config import section_options
from dynaplan.config.settings.worker import ProcessSettings
from dynaplan.contract.counts import FleetCounts, PoolSizes
from dynaplan.contract.holds import HOLDS, RoleHolds
from dynaplan.contract.store_keys import (
    COUNT_KEYS,
    FREE_GPUS,
    GPUS_LEFT_OUT,
    LEAVE_FIRST,
    SCALED_ROLES,
    DesiredCounts,
    by_name,
    fleet_key,
    scaling_key,
    scaling_prefix,
)
from dynaplan.fleet.launch import read_launch
from dynaplan.fleet.rules.lost_keys import TimedEntries
from dynaplan.fleet.rules.statefile import Document, planner_keys_of
from dynaplan.fleet.startup_times import StartupTimesFile, median_startup_s, startup_key
from dynaplan.graph.lifecycle import Role, WorkerState
from dynaplan.planner.model import DecisionRecord
from dynaplan.planner.rules.decision import has_data, preview_decision
from dynaplan.planner.sla_model import build_sla_model
from dynaplan.store.model import Transaction
from dynaplan.util.documents import parse_object
from dynaplan.util.durations import clock, wall_clock
from dynaplan.util.errors import TemporaryError, UserError
from dynaplan.util.progress import ProgressLine, left_words

if TYPE_CHECKING:
    from dynaplan.config.settings.planner import PlannerSettings
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.fleet.scale_progress import ScaleProgress
    from dynaplan.planner.rules.sla_policy import PerformanceModel
    from dynaplan.store.port import KeyValueStore

E = TypeVar("E", bound=TimedEntries)

ATTEMPTS = 5
"""Attempts to write the counts while others write them too."""


@dataclass(frozen=True)
class WrittenCounts:
    """The result of a user's change of counts and holds.

    ``asked`` are the counts that were written by it. ``counts`` and ``holds`` are all that are in force after
    it, ``counts_before`` and ``holds_before`` those until then.
    """

    decision_id: int
    asked: Mapping[Role, int]
    counts: DesiredCounts
    holds: RoleHolds
    counts_before: DesiredCounts
    holds_before: RoleHolds


Change = Callable[[DesiredCounts, RoleHolds], tuple[dict[Role, int], RoleHolds]]
"""Returns the counts to ask for and the holds from then on; it may raise UserError."""


def without_holds(roles: Iterable[Role]) -> Change:
    """Return the change that ends the holds of these roles, and asks for no other counts."""

    def change(_: DesiredCounts, holds: RoleHolds) -> tuple[dict[Role, int], RoleHolds]:
        for role in roles:
            holds = holds.replaced(role, None)
        return {}, holds

    return change


async def write_counts(
    store: KeyValueStore, namespace: str, change: Change, leave_first: str = ""
) -> WrittenCounts:
    """Write the counts and holds that ``change`` makes of the present ones.

    When it asks for no counts, only the holds are written, and no decision is made.

    If the decision removes a worker, it is ``leave_first`` before any other.

    The decision id is above every id in use. If a key has changed since it was read, the transaction fails
    and is retried with the new values; TemporaryError after ``ATTEMPTS``. Expired and invalid holds are
    ignored.
    """
    for _ in range(ATTEMPTS):
        items = {item.key: item for item in await store.list(scaling_prefix(namespace))}
        now = DesiredCounts.from_keys(namespace, {key: item.value for key, item in items.items()})
        held = by_name(namespace, items).get(HOLDS)
        text = held.value if held else RoleHolds().to_text()
        before = current_holds(text)
        asked, holds = change(now, before)
        puts = {scaling_key(namespace, COUNT_KEYS[role]): str(number) for role, number in asked.items()}
        decision_id = now.next_decision_id if asked else now.decision_id
        if asked:
            puts[scaling_key(namespace, "decision_id")] = str(decision_id)
            if leave_first:
                puts[scaling_key(namespace, LEAVE_FIRST)] = f"{decision_id} {leave_first}"
        if holds.to_text() != text:
            puts[scaling_key(namespace, HOLDS)] = holds.to_text()
        expected = dict.fromkeys((*puts, scaling_key(namespace, HOLDS)), 0)
        expected |= {key: item.revision for key, item in items.items()}
        if await store.commit(Transaction(expected=expected, puts=puts)):
            keys = {key: item.value for key, item in items.items()} | puts
            counts = DesiredCounts.from_keys(namespace, keys)
            return WrittenCounts(decision_id, asked, counts, holds, now, before)
    raise TemporaryError("somebody else changes the desired counts all the time", hint="Try again.")


async def change_entries(
    store: KeyValueStore, namespace: str, name: str, read: Callable[[str], E], change: Callable[[E], E]
) -> tuple[E, E]:
    """Change the holds or reservations under the planner's key ``name``; return them before and after.

    Entries that have expired or cannot be read count as none. ``change`` may raise UserError; TemporaryError
    when others keep changing the key.
    """
    key = scaling_key(namespace, name)
    for _ in range(ATTEMPTS):
        items = {item.key: item for item in await store.list(scaling_prefix(namespace))}
        item = by_name(namespace, items).get(name)
        before = current_entries(read, item.value if item else "")
        after = change(before)
        expected = {key: items[key].revision if key in items else 0}
        if await store.commit(Transaction(expected=expected, puts={key: after.to_text()})):
            return before, after
    raise TemporaryError(f"somebody else changes the {name} all the time", hint="Try again.")


def current_entries(read: Callable[[str], E], text: str) -> E:
    """Return the entries of a key's value that have not expired; none when it cannot be read."""
    try:
        return read(text).without_expired(time.time())
    except ValueError:
        return read("")


def current_holds(text: str) -> RoleHolds:
    """Return the holds in force out of the key's value; none when it cannot be read."""
    return current_entries(RoleHolds.from_text, text)


def statefile_holds(document: Document) -> RoleHolds:
    """Return the holds in force that the statefile remembers: for when the store does not answer."""
    return current_holds(planner_keys_of(document).get(HOLDS, ""))


async def published_fleet(store: KeyValueStore, namespace: str) -> FleetCounts | None:
    """Return the fleet that the plugin publishes; None when there is none that can be read.

    ``status`` names one that cannot be read; the plugin publishes a good one at its next change.
    """
    try:
        published = await _published(store, namespace)
        return FleetCounts.from_json(published) if published else None
    except ValueError:
        return None


async def free_gpus(store: KeyValueStore, namespace: str) -> int | None:
    """Return the number of GPUs that a further worker may get, as the plugin publishes it; None: unknown."""
    free = await _published_list(store, namespace, FREE_GPUS)
    return None if free is None else len(free)


async def left_out_gpus(store: KeyValueStore, namespace: str) -> tuple[str, ...]:
    """Return a line for each reason for which GPUs of the box are left out, as the plugin publishes them."""
    return tuple(map(str, await _published_list(store, namespace, GPUS_LEFT_OUT) or ()))


async def _published_list(store: KeyValueStore, namespace: str, name: str) -> list[Any] | None:
    try:
        found = (await _published(store, namespace)).get(name)
    except ValueError:
        return None
    return found if isinstance(found, list) else None


async def _published(store: KeyValueStore, namespace: str) -> dict[str, Any]:
    """Return what the fleet plugin publishes, empty for nothing; raises ValueError for no JSON object."""
    item = await store.get(fleet_key(namespace))
    return parse_object(item.value) if item else {}


START_TIME_FACTOR = 3
"""A start is waited for this many times as long as starts took before."""

MIN_WAIT_S = 120.0
"""Least time that is waited, seconds."""

DEFAULT_START_S = 600.0
"""Time for a start of which nothing was learnt, seconds: a large model comes from a slow disk."""

GPU_RELEASE_S = 10.0
"""Time from a drain's end to the release of the GPUs, seconds: the engine ends, and its session."""


@dataclass(frozen=True)
class ScaleTimes:
    """Seconds in which workers usually start (``start_s``, None: unknown) and at most leave (``leave_s``)."""

    start_s: float | None
    leave_s: float

    def limit_s(self, *, starts: bool, leaves: bool) -> float:
        """Return the longest time to wait for workers that start, and for others that leave."""
        start_s = DEFAULT_START_S if self.start_s is None else START_TIME_FACTOR * self.start_s
        leave_s = self.leave_s + GPU_RELEASE_S if leaves else 0.0
        return max(MIN_WAIT_S, (start_s if starts else 0.0) + leave_s)


def expected_times(found: RunningDeployment, wanted: Mapping[Role, int]) -> ScaleTimes:
    """Return the longest learnt start-up time and configured time to leave of these roles' workers."""
    try:
        launch = read_launch(found.runtime_dir)
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return ScaleTimes(None, ProcessSettings.drain_deadline_s)
    learnt = StartupTimesFile.beside(found.statefile).read()
    own = [worker for worker in found.workers if worker.role in wanted]
    keys = {startup_key(worker, launch.settings_of(worker.component)) for worker in own}
    usual = [seconds for key in keys if (seconds := median_startup_s(learnt, key)) is not None]
    leave_s = [launch.leave_timeout_of(worker.component) for worker in own]
    return ScaleTimes(max(usual, default=None), max(leave_s, default=launch.leave_timeout_s))


def wait_limit_s(found: RunningDeployment, wanted: Mapping[Role, int], times: ScaleTimes) -> float:
    """Return the most seconds that it may take from the present workers to the wanted numbers."""
    starts = leaves = False
    for role, number in wanted.items():
        states = [worker.state for worker in found.workers if worker.role is role]
        starts |= states.count(WorkerState.READY) < number
        leaves |= len(states) > number or WorkerState.DRAINING in states
    return times.limit_s(starts=starts, leaves=leaves)


def progress_watcher(times: ScaleTimes, line: ProgressLine) -> Callable[[ScaleProgress], None]:
    """Return the function that shows the progress, with the time that is left, until it is carried out."""
    begun_s = time.monotonic()

    def watch(progress: ScaleProgress) -> None:
        if progress.missing:
            news = "; ".join(progress.missing)
            passed_s = time.monotonic() - begun_s
            line.show(f"{clock(passed_s)}{_left(progress, times, passed_s)}: {news}", news)

    return watch


def _left(progress: ScaleProgress, times: ScaleTimes, passed_s: float) -> str:
    """Return the time left in words after a comma; empty when nothing is known."""
    if WorkerState.DRAINING in progress.under_way:
        return f", at most {clock(times.leave_s - passed_s)} left"
    if WorkerState.STARTING not in progress.under_way or times.start_s is None:
        return ""
    left_s = times.start_s - passed_s
    return f", {left_words(left_s)}" if left_s > 0 else f", usually {clock(times.start_s)}"


def planner_settings(found: RunningDeployment) -> PlannerSettings | None:
    """Return the settings of the planner that scales this deployment; None when none does."""
    settings = configured_planner_settings(found)
    return None if settings is None or settings.no_operation else settings


def configured_planner_settings(found: RunningDeployment) -> PlannerSettings | None:
    """Return the settings of the graph's planner, also of one that only observes; None without one.

    Planners of models that are loaded on request scale each its own.
    """
    from dynaplan.config.model_entries import planned_models
    from dynaplan.config.planner import settings_of

    planner = next((each.component for each in found.workers if each.role is Role.PLANNER), "")
    config = service_config(found)
    if not planner or planned_models(config):
        return None
    return settings_of(section_options(config, planner))


def describe_next_decision(
    found: RunningDeployment,
    settings: PlannerSettings,
    counts: DesiredCounts,
    holds: RoleHolds,
    *,
    is_decision: bool = True,
) -> str:
    """Return when the planner decides next, and which counts it would choose for the last observed load.

    ``is_decision``: True when the user has just set counts, False when a hold was only released.
    """
    from dynaplan.planner.own_policy import load_own_policy

    last = _last_record(found)
    sentence = f"The planner decides again {_when(settings, last, is_decision=is_decision)}"
    if last is None or not has_data(last.observation):
        return f"{sentence}, and may change that."
    workers = PoolSizes(max(0, counts.num_prefill_workers), max(0, counts.num_decode_workers))
    try:
        in_force = holds.in_force(time.time(), wall_clock)
        decision = preview_decision(last, workers, in_force, _model(last), load_own_policy(last.settings))
    except (UserError, OSError, ValueError):
        return f"{sentence}, and may change that."
    if not decision.is_change:
        return f"{sentence}. With the load that it saw last it would keep that, and may change it later."
    changed = [role for role in SCALED_ROLES if decision.desired.of(role) != decision.current.of(role)]
    other = ", ".join(f"{role.value}={decision.desired.of(role)}" for role in changed)
    return f"{sentence}. With the load that it saw last it would ask for {other}: {decision.reason}."


def _when(settings: PlannerSettings, last: DecisionRecord | None, *, is_decision: bool) -> str:
    interval_s = settings.adjustment_interval_s
    if not settings.is_by_targets and is_decision:
        return f"{interval_s:g} s after this is carried out"
    if last:
        since_s = (datetime.now().astimezone() - datetime.fromisoformat(last.wall_time)).total_seconds()
        if 0 <= since_s < interval_s:
            return f"in {interval_s - since_s:.0f} s"
    return f"within {interval_s:g} s"


def _last_record(found: RunningDeployment) -> DecisionRecord | None:
    for document in decisions_of(found, 1):
        try:
            record = DecisionRecord.from_json(document)
            datetime.fromisoformat(record.wall_time)
        except (KeyError, TypeError, ValueError, AttributeError, UserError):
            return None
        return record
    return None


def _model(last: DecisionRecord) -> PerformanceModel | None:
    return build_sla_model(last.settings) if last.settings.is_by_targets else None
