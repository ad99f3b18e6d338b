"""What a decision says of the engines' options, and what it has changed: on a fleet that does as asked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import PoolSizes, WorkerCounts
from dynaplan.contract.holds import Hold, RoleHolds
from dynaplan.contract.option_changes import DONE, RELOAD_INTERRUPTED, OptionChange
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.planner.model import BacktestResult, DecisionStep, Observation, OptionTrial, PlannerState
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.rules.option_adjustment import BARRED_WINDOWS, ENGINE_OPTION, JUDGED_PART
from tests.unit.planner.rules.targets import SETTINGS, model, planned_interval, traffic

MORE_SLOTS = OptionTrial("VllmWorker", "max-num-seqs", 8, 16, 0.672, 0.998, is_certain=True)
ADJUSTING = replace(SETTINGS, adjust_knobs=True, slo_window_s=400.0, decode_max_num_seqs=8)
T, WINDOW_S = ADJUSTING.adjustment_interval_s, ADJUSTING.slo_window_s
QUARTER_S = WINDOW_S / JUDGED_PART
MODEL = model()


def observed(trial: OptionTrial | None) -> Observation:
    answer = BacktestResult(PoolSizes(1, 1), requests=900, window_s=900.0, best_trial=trial)
    return replace(planned_interval(1, 1, [1.0]), backtest=answer)


def said(observation: Observation, settings: PlannerSettings = SETTINGS) -> list[str]:
    _, decision = decide(settings, PlannerState(), observation, MODEL)
    return [step.why for step in decision.steps if step.stage == ENGINE_OPTION]


def test_a_gain_beyond_chance_is_said_with_both_parts() -> None:
    assert said(observed(MORE_SLOTS)) == [
        "VllmWorker.max-num-seqs 8 -> 16 would have kept 99.8% of the last 15 min, 67.2% as it is"
    ]


def test_a_gain_within_chance_leaves_the_options_as_they_are() -> None:
    [why] = said(observed(replace(MORE_SLOTS, is_certain=False)))
    assert why.startswith("nothing that was tried keeps more beyond chance: at best VllmWorker.max-num-seqs")


def test_nothing_is_said_where_nothing_was_tried() -> None:
    assert said(observed(None)) == []
    assert said(planned_interval(1, 1, [1.0])) == []


def test_what_was_found_changes_no_number_of_workers_and_survives_its_record() -> None:
    observation = observed(MORE_SLOTS)
    _, decision = decide(SETTINGS, PlannerState(), observation, MODEL)
    step = next(each for each in decision.steps if each.stage == ENGINE_OPTION)
    assert step == DecisionStep(ENGINE_OPTION, decision.current, decision.current, step.why)
    assert Observation.from_json(observation.to_json()) == observation


@dataclass
class Box:
    """A deployment whose fleet plugin makes a change within ``takes`` intervals, unless it fails.

    Each change restarts the planner, with the new options as its settings and its state as it was recorded.
    """

    settings: PlannerSettings = ADJUSTING
    takes: int = 2
    failure: str = ""
    trial: OptionTrial | None = MORE_SLOTS
    missed: float = 5.0
    requests_per_s: float = 2.0
    holds: RoleHolds = field(default_factory=RoleHolds)
    desired: DesiredCounts = field(default_factory=lambda: DesiredCounts(1, 1, 1, 1))
    gpus: int = 8
    now_s: float = 1000.0
    key: OptionChange | None = None
    asked: list[OptionChange] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    state: PlannerState = field(default_factory=PlannerState)

    def interval(self) -> None:
        """Let one interval pass, and the plugin do what the decision asks for."""
        self.now_s += T
        came, settings = traffic(self.requests_per_s), self.settings
        over = ((settings.ttft_ms, self.missed),), ((settings.itl_ms, 0.0),)
        answer = BacktestResult(PoolSizes(1, 1), requests=900, window_s=900.0, best_trial=self._found())
        seen = planned_interval(1, 1, [self.requests_per_s], at_s=self.now_s)
        seen = replace(
            seen,
            fleet=replace(seen.fleet, gpus_total=self.gpus),
            traffic=replace(came, over_ttft=over[0], over_itl=over[1]),
            backtest=answer,
            desired=self.desired,
            holds=self.holds,
            option_change=self.key,
        )
        self.state, decision = decide(settings, self.state, seen, MODEL)
        self.state = PlannerState.from_json(self.state.to_json())
        self.lines += [step.why for step in decision.steps if step.stage == ENGINE_OPTION]
        change = self.state.options.change
        if change and change.asked_s == self.now_s:
            self.asked.append(change)
            self.key = change
        elif self.key and not self.key.result and self.now_s >= self.key.asked_s + self.takes * T:
            self.key = replace(self.key, result=self.failure or DONE)
            if not self.failure:
                self.settings = replace(settings, decode_max_num_seqs=self.key.after)

    def _found(self) -> OptionTrial | None:
        present = self.settings.decode_max_num_seqs
        return self.trial if self.trial and self.trial.value_before == present else None

    def passes(self, seconds: float) -> None:
        for _ in range(round(seconds / T)):
            self.interval()

    def asks(self) -> OptionChange:
        """Let time pass until a change is asked for."""
        for _ in range(200):
            self.interval()
            if self.asked:
                return self.asked[-1]
        raise AssertionError("nothing was asked for")


def test_a_sure_gain_is_asked_for_once_there_is_something_to_compare_with_and_stays_if_kept() -> None:
    box = Box()
    change = box.asks()
    assert (change.option, change.before, change.after) == ("max-num-seqs", 8, 16)
    assert change.asked_s - 1000.0 >= QUARTER_S
    box.missed = 0.0
    box.passes(WINDOW_S)
    assert "VllmWorker.max-num-seqs 8 -> 16 stays: 100.0% of 200 requests in time, 75.0% before" in box.lines
    assert box.settings.decode_max_num_seqs == 16
    assert len(box.asked) == 1


def test_a_change_after_which_more_is_missed_is_taken_back_and_not_tried_for_a_day_of_windows() -> None:
    box = Box()
    box.asks()
    box.missed = 15.0
    box.passes(BARRED_WINDOWS * WINDOW_S)
    assert [(each.before, each.after) for each in box.asked] == [(8, 16), (16, 8)]
    assert any("is taken back: 25.0% of" in line for line in box.lines)
    assert box.settings.decode_max_num_seqs == 8
    box.passes(2 * WINDOW_S)
    assert [each.after for each in box.asked][:3] == [16, 8, 16]


def test_chance_takes_nothing_back() -> None:
    box = Box()
    box.asks()
    box.missed = 5.5
    box.passes(WINDOW_S)
    assert any("stays: 72.5%" in line for line in box.lines)


def test_what_more_load_has_missed_is_not_held_against_a_change() -> None:
    box = Box()
    box.asks()
    box.missed, box.requests_per_s = 30.0, 4.0
    box.passes(WINDOW_S / 2)
    assert any("is judged later, since more comes than before it" in line for line in box.lines)
    box.passes(WINDOW_S)
    assert any(" stays: " in line for line in box.lines)
    assert len(box.asked) == 1


def test_a_change_that_could_not_be_made_is_not_tried_again_and_the_reason_is_said() -> None:
    box = Box(failure="1 of 2 decode workers ready")
    box.asks()
    box.passes(4 * WINDOW_S)
    assert "VllmWorker.max-num-seqs 8 -> 16 was not made: 1 of 2 decode workers ready" in box.lines
    assert len(box.asked) == 1


def test_a_change_that_meets_a_reload_that_was_killed_is_asked_for_again_a_window_later() -> None:
    box = Box(failure=RELOAD_INTERRUPTED)
    box.asks()
    box.passes(2 * WINDOW_S)
    assert any("was not made: a reload was interrupted" in line for line in box.lines)
    assert [later.asked_s - earlier.asked_s for earlier, later in pairwise(box.asked)] == [WINDOW_S, WINDOW_S]
    box.failure = ""
    box.passes(WINDOW_S + box.takes * T)
    assert box.settings.decode_max_num_seqs == MORE_SLOTS.value_after


def test_a_person_who_sets_the_option_afterwards_is_not_overruled() -> None:
    box = Box()
    box.asks()
    box.missed = 0.0
    box.passes(WINDOW_S)
    box.settings = replace(box.settings, decode_max_num_seqs=8)
    box.passes(4 * WINDOW_S)
    assert any("is not what a person wants: it is 8 since" in line for line in box.lines)
    assert len(box.asked) == 1


def test_another_deployment_begins_with_the_options_of_its_file_and_what_was_barred() -> None:
    box = Box()
    box.asks()
    box.missed = 15.0
    box.passes(WINDOW_S)
    box.key = None
    box.passes(2 * WINDOW_S)
    assert [each.after for each in box.asked] == [16, 8]
    assert box.state.options.change is None


def test_a_planner_without_its_memory_goes_on_with_the_change_that_the_store_has() -> None:
    box = Box(takes=5)
    box.asks()
    box.state = PlannerState()
    box.passes(WINDOW_S - QUARTER_S)
    assert len(box.asked) == 1
    assert box.settings.decode_max_num_seqs == 16


@pytest.mark.parametrize(
    ("changed", "objection"),
    [
        ({"settings": replace(ADJUSTING, no_operation=True)}, "no-operation"),
        ({"holds": RoleHolds(decode=Hold(1, 1, by="alice"))}, "somebody holds a number of workers"),
        ({"desired": DesiredCounts(1, 1, 2, 1)}, "a decision is being carried out"),
        ({"gpus": 2}, "while its only worker starts again nobody answers"),
    ],
)
def test_no_worker_is_replaced_where_something_is_in_the_way(
    changed: dict[str, object], objection: str
) -> None:
    box = replace(Box(), **changed)  # type: ignore[arg-type]
    box.passes(2 * WINDOW_S)
    assert box.asked == []
    assert any(f"is not made: {objection}" in line for line in box.lines)


@pytest.mark.parametrize(("missed", "foretold", "kept"), [(0.0, 0.998, "100.0%"), (5.0, 0.75, "75.0%")])
def test_nothing_is_changed_where_the_record_keeps_as_much_as_the_other_value_is_to(
    missed: float, foretold: float, kept: str
) -> None:
    box = Box(missed=missed, trial=replace(MORE_SLOTS, in_time_after=foretold))
    box.passes(2 * WINDOW_S)
    assert box.asked == []
    why = f"VllmWorker.max-num-seqs 8 -> 16 is not made: {kept} of the last 2 min were in time as it is"
    assert why in box.lines


def test_with_no_operation_nothing_is_taken_back() -> None:
    box = Box()
    box.asks()
    box.settings = replace(box.settings, no_operation=True)
    box.missed = 15.0
    box.passes(WINDOW_S)
    assert len(box.asked) == 1
    assert any("is to be taken back, and is not yet: no-operation" in line for line in box.lines)


def test_what_the_store_did_not_get_is_asked_for_again_once_nothing_is_in_the_way() -> None:
    box = Box()
    box.asks()
    box.passes(4 * T)
    made, box.missed = box.key, 15.0
    while len(box.asked) == 1:
        box.interval()
    box.key, box.holds = made, RoleHolds(decode=Hold(1, 1, by="alice"))
    box.passes(2 * T)
    assert len(box.asked) == 2
    assert "has to be asked for again, and is not yet: somebody holds" in box.lines[-1]
    box.holds = RoleHolds()
    box.passes(WINDOW_S)
    assert [each.after for each in box.asked] == [16, 8, 8]
    assert box.settings.decode_max_num_seqs == 8


def test_a_change_from_a_value_that_was_of_no_use_before_is_judged_like_any_other() -> None:
    box = Box()
    box.asks()
    box.missed = 15.0
    box.passes(WINDOW_S)
    box.settings = replace(box.settings, decode_max_num_seqs=16)
    box.trial, box.missed = replace(MORE_SLOTS, value_before=16, value_after=32), 5.0
    while len(box.asked) == 2:
        box.interval()
    assert (box.asked[-1].before, box.asked[-1].after) == (16, 32)
    box.missed = 15.0
    box.passes(WINDOW_S)
    assert (box.asked[-1].before, box.asked[-1].after) == (32, 16)


def test_a_change_of_before_the_machine_was_started_again_stops_no_other() -> None:
    box = Box(key=replace(OptionChange("VllmWorker", "max-num-seqs", 4, 8, 1e6), result=DONE))
    assert box.asks().after == 16


def test_without_the_option_nothing_is_changed_or_remembered() -> None:
    box = Box(settings=replace(ADJUSTING, adjust_knobs=False))
    box.passes(2 * WINDOW_S)
    assert box.asked == []
    assert "options" not in box.state.to_json()


def test_sleeping_workers_are_left_alone() -> None:
    asleep = WorkerCounts(ready=1, asleep=1)
    observation = replace(observed(MORE_SLOTS), desired=DesiredCounts(1, 1, 1, 1))
    observation = replace(observation, fleet=replace(observation.fleet, decode=asleep, gpus_total=8))
    assert said(observation, ADJUSTING)[1].endswith("is not made: workers sleep")


happening = st.tuples(
    st.floats(0, 20),
    st.sampled_from([0.5, 2.0, 4.0]),
    st.booleans(),
    st.sampled_from(["", "", "", "no memory"]),
    st.integers(1, 6),
    st.booleans(),
)


@given(st.lists(st.tuples(happening, st.integers(1, 20)), max_size=8))
def test_whatever_happens_at_most_one_change_is_asked_for_in_a_window_and_no_barred_value(
    course: list[tuple[tuple[float, float, bool, str, int, bool], int]],
) -> None:
    box = Box()
    for (missed, rate, is_held, failure, takes, is_lost), intervals in course:
        box.missed, box.requests_per_s, box.failure, box.takes = missed, rate, failure, takes
        box.holds = RoleHolds(decode=Hold(1, 1, by="alice")) if is_held else RoleHolds()
        box.state = PlannerState() if is_lost else box.state
        for _ in range(intervals):
            barred, asked = box.state.options, len(box.asked)
            box.interval()
            if len(box.asked) > asked:
                change = box.asked[-1]
                assert not is_held
                assert not barred.bars(change.component, change.option, change.after, box.now_s)
    onwards = [each for each in box.asked if each.after > each.before]
    assert all(later.asked_s - before.asked_s >= WINDOW_S for before, later in pairwise(onwards))
    assert sum(each.length_s for each in box.state.options.recent_parts) <= QUARTER_S * 1.5
