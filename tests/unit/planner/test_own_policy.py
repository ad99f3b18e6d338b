"""A policy of the user's own: the example of the guide, live, simulated and replayed, and ones that fail."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.holds import Hold, RoleHolds
from dynaplan.contract.traffic import Traffic
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.policy_runs import run_simulations
from dynaplan.planner.model import Decision, DecisionRecord, Observation, PlannerState
from dynaplan.planner.own_policy import load_own_policy
from dynaplan.planner.recorders.decision_log import JsonLinesRecorder
from dynaplan.planner.replay import replay
from dynaplan.planner.rules.decision import OwnPolicy, decide
from dynaplan.util.errors import ConfigError, GraphError
from tests.unit.planner.rules.situations import interval

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "your-own-policy.md"
SETTINGS = PlannerSettings(policy="by_rate.py:decide")


@pytest.fixture(autouse=True)
def by_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's example as a reader has it, in the working directory."""
    found = re.search(r"```python\n# by_rate\.py\n(.+?)```", GUIDE.read_text(), re.DOTALL)
    assert found
    (tmp_path / "by_rate.py").write_text(found[1])
    monkeypatch.chdir(tmp_path)


def seen(requests: float | None, decode: int = 1, queue: float = 0.0, at_s: float = 30.0) -> Observation:
    traffic = Traffic(30.0, requests, missing="" if requests else "no frontend")
    return replace(interval(1, decode, 0.5, (queue,), at_s), traffic=traffic)


def decided(observation: Observation, settings: PlannerSettings = SETTINGS) -> Decision:
    return decide(settings, PlannerState(), observation, None, load_own_policy(settings))[1]


@pytest.mark.parametrize(
    ("observation", "desired", "why"),
    [
        (seen(300), PoolSizes(1, 3), "10.00 requests/s, 4 for each decode worker"),
        (seen(30, decode=3), PoolSizes(1, 1), "1.00 requests/s"),
        (seen(30, decode=3, queue=2.0), PoolSizes(1, 3), "1 would do, but prompts wait"),
        (seen(None, decode=2), PoolSizes(1, 2), "the traffic is not known"),
    ],
)
def test_the_function_decides_and_its_steps_are_the_trail(
    observation: Observation, desired: PoolSizes, why: str
) -> None:
    decision = decided(observation)
    assert decision.desired == desired
    assert why in decision.reason or any(why in step.why for step in decision.steps)


def test_the_gpu_budget_cuts_what_it_asks_for() -> None:
    decision = decided(seen(6000))
    assert decision.desired == PoolSizes(1, 7)
    assert decision.steps[-1].stage == "budget"


def test_a_hold_of_a_person_comes_last() -> None:
    held = RoleHolds(decode=Hold(2, 2))
    decision = decided(replace(seen(300), holds=held))
    assert decision.desired.decode == 2
    assert decision.steps[-1].stage == "held"


def test_it_is_not_asked_while_the_fleet_is_not_known() -> None:
    def fail(*given: Any) -> tuple[PlannerState, Decision]:
        raise AssertionError("asked")

    unknown = replace(seen(300), unknown="the store does not answer")
    _, decision = decide(SETTINGS, PlannerState(), unknown, None, fail)
    assert not decision.is_change
    assert "the store does not answer" in decision.reason


def raising(*given: Any) -> tuple[PlannerState, Decision]:
    raise KeyError("rate")


def returning_nonsense(*given: Any) -> Any:
    return "three workers"


@pytest.mark.parametrize(("own", "kind"), [(raising, "KeyError"), (returning_nonsense, "ValueError")])
def test_a_function_that_raises_or_returns_no_decision_changes_nothing_and_the_trail_says_so(
    own: OwnPolicy, kind: str
) -> None:
    state, decision = decide(SETTINGS, PlannerState(decode_grace_left=2), seen(300), None, own)
    assert not decision.is_change
    assert f"by_rate.py:decide raised {kind}" in decision.reason
    assert state.decode_grace_left == 1


def test_what_it_decided_live_is_decided_again_by_a_replay(tmp_path: Path) -> None:
    recorder, state, own = JsonLinesRecorder(tmp_path / "log"), PlannerState(), load_own_policy(SETTINGS)
    for number, requests in enumerate((30, 300, 900, 60)):
        observation = seen(requests, at_s=30.0 * number)
        after, decision = decide(SETTINGS, state, observation, None, own)
        recorder.record_decision(
            DecisionRecord(
                f"2026-01-01T12:{number:02}:00+00:00", SETTINGS, state, observation, decision, after
            )
        )
        state = after
    recorder.close()
    replayed = replay(tmp_path / "log" / "decisions.jsonl", {})
    assert len(replayed) == 4
    assert all(each.recorded == each.replayed for each in replayed)
    changed = Path("by_rate.py").read_text().replace("PER_WORKER_S = 4.0", "PER_WORKER_S = 2.0")
    Path("by_two.py").write_text(changed)
    other = replay(tmp_path / "log" / "decisions.jsonl", {"policy": "by_two.py:decide"})
    assert [each.is_same for each in other] == [True, False, True, True]  # 900 requests: the budget cuts both


def test_it_is_simulated_beside_the_planners_own_policies() -> None:
    options = SimulateOptions(
        trace="sinusoid:low=2,high=20,period=120,duration=240",
        policies=("by_rate.py:decide", "load"),
        gpus=8,
    )
    own, by_load = run_simulations(options)
    assert (own.policy, by_load.policy) == ("by_rate.py:decide", "load")
    assert own.outcome.requests == by_load.outcome.requests > 0
    assert max(each.gpus for each in own.fleet) > 2
    assert any("for each decode worker" in each.why for each in own.events)


@pytest.mark.parametrize(
    ("policy", "error", "words"),
    [
        ("by_rate.py:decides", ConfigError, "Did you mean 'decide'"),
        ("by_night.py:decide", GraphError, "by_night"),
        ("no_such_package:decide", GraphError, "no_such_package"),
    ],
)
def test_a_function_that_is_not_there_is_refused_with_the_nearest(
    policy: str, error: type[ConfigError], words: str
) -> None:
    with pytest.raises(error) as raised:
        load_own_policy(PlannerSettings(policy=policy))
    assert words in f"{raised.value} {raised.value.hint}"


def test_another_word_is_still_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="policy") as raised:
        PlannerSettings.from_options({"policy": "slo"})
    assert "load, sla, both, or MODULE:FUNCTION" in f"{raised.value} {raised.value.hint}"
