"""What a recording recommends: the cheapest that kept the promise, and no change without a reason."""

from dataclasses import replace

import pytest

from dynaplan.config.settings.frontend import DisaggregationSettings
from dynaplan.config.settings.planner import SlaTargets
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.policy_runs import (
    candidates_beside,
    compare_results,
    describe_change,
    recommend_policy,
)
from dynaplan.lab.simulate.settings_tried import settings_beside
from dynaplan.simulation.outcome import Outcome, Slo
from dynaplan.simulation.run import Result

PROMISED = SlaTargets(500, 50, 95, 95)


def result(policy: str, in_time: int, gpus: float) -> Result:
    """An hour of a hundred requests, so many of them within both targets."""
    outcome = Outcome(Slo(500, 50), requests=100, ttft_met=in_time, itl_met=100, both_met=in_time)
    return Result(policy, outcome, gpus, 3600.0, 3600.0, 0, 0)


@pytest.mark.parametrize(
    ("others", "policy"),
    [
        ([result("sla", 99, 5.0), result("best-static:2,2", 96, 4.0)], "best-static:2,2"),
        ([result("sla", 94, 4.0)], "sla"),
        ([result("sla", 71, 4.0)], "load"),
    ],
    ids=["the cheapest that keeps it", "the nearest to it", "no change for a point"],
)
def test_a_broken_promise_is_answered_by(others, policy):
    assert compare_results([result("load", 70, 4.0), *others], PROMISED).policy == policy


@pytest.mark.parametrize(("gpus", "policy"), [(3.7, "sla"), (3.9, "load"), (4.5, "load")])
def test_a_kept_promise_is_only_left_for_more_than_a_twentieth_of_the_gpus(gpus, policy):
    results = [result("load", 97, 4.0), result("sla", 96, gpus), result("best-static:1,1", 60, 2.0)]
    assert compare_results(results, PROMISED).policy == policy


def test_it_says_what_to_set_and_what_is_gained():
    results = [result("load", 70, 4.0), result("sla", 99, 5.0)]
    assert compare_results(results, PROMISED).words == (
        "set --Planner.policy=sla: 99.0% in time with 5.0 GPUs, where load had 70.0% in time with 4.0 GPUs. "
        "It keeps the promise"
    )
    assert describe_change("best-static:2,1") == "stop scaling and keep 2 prefill and 1 decode workers"
    assert describe_change("best-static:3") == "stop scaling and keep 3 workers"


def test_the_own_policy_is_the_first_that_is_tried_and_stands_once():
    assert candidates_beside("sla") == ("sla", "load", "best-static")
    assert candidates_beside("both") == ("both", "load", "sla", "best-static")


OPTIONS = SimulateOptions("poisson:rate=1,duration=10", engine={"max-num-seqs": 64})
BY_TARGETS = replace(OPTIONS, planner={"policy": "sla"})


def settings_of(options: SimulateOptions) -> list[str]:
    return [each.text for each in settings_beside(options)]


def test_the_engine_s_steps_are_tried_halved_and_doubled_where_they_count():
    engine = settings_of(OPTIONS)
    assert engine == [
        "PrefillWorker.max-num-batched-tokens=4096",
        "PrefillWorker.max-num-batched-tokens=16384",
        "VllmWorker.max-num-seqs=32",
        "VllmWorker.max-num-seqs=128",
    ]
    aggregated = settings_of(replace(OPTIONS, is_disaggregated=False))
    assert aggregated[0] == "VllmWorker.max-num-batched-tokens=4096"


def test_a_setting_is_tried_on_the_workers_that_it_names_alone():
    first, *_, last = settings_beside(OPTIONS)
    assert first.options.engine_of(Role.DECODE) == OPTIONS.engine
    assert first.options.engine_of(Role.PREFILL)["max-num-batched-tokens"] == 4096
    assert last.options.engine_of(Role.PREFILL) == OPTIONS.engine


def test_what_the_planner_sets_itself_is_tried_where_it_does_not_yet():
    assert settings_of(BY_TARGETS)[4:] == ["Planner.max-running-requests=auto"]
    assert not settings_of(replace(OPTIONS, planner={"policy": "sla", "max-running-requests": 4}))[4:]
    assert not settings_of(replace(OPTIONS, planner={"policy": "sla", "sizing": "formula"}))[4:]
    conditional = replace(BY_TARGETS, disaggregation=DisaggregationSettings(is_conditional=True))
    assert "Planner.max-local-prefill-length=auto" in settings_of(conditional)


@pytest.mark.parametrize("planner", [{"sizing": "formula"}, {"max-running-requests": "auto"}])
def test_a_deployment_for_targets_is_tried_beside_what_has_none(planner):
    options = replace(OPTIONS, policies=("sla", "load", "best-static"), planner=planner)
    results = recommend_policy(options).results
    assert [each.policy for each in results[:2]] == ["sla", "load"]
    assert results[2].policy.startswith("best-static")


def test_a_setting_that_is_better_is_recommended_as_it_is_written():
    results = [result("sla", 97, 4.0), result("sla --VllmWorker.max-num-seqs=128", 96, 3.0)]
    words = compare_results(results, PROMISED).words
    assert words.startswith("set --VllmWorker.max-num-seqs=128: 96.0% in time with 3.0 GPUs")
