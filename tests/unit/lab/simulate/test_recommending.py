"""What a recording recommends: the cheapest that kept the promise, and no change without a reason."""

import pytest

from dynaplan.config.settings.sla import SlaTargets
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.recommending import how_to, recommendation, standing_beside, tried_beside
from dynaplan.lab.simulate.run import Result
from dynaplan.simulation.outcome import Outcome, Slo

PROMISED = SlaTargets(500, 50, 95, 95)


def result(policy: str, in_time: int, gpus: float) -> Result:
    """An hour of a hundred requests, so many of them within both targets."""
    outcome = Outcome(Slo(500, 50), requests=100, ttft_met=in_time, itl_met=100, both_met=in_time)
    return Result(policy, outcome, gpus, 3600.0, 3600.0, 0, 0)


@pytest.mark.parametrize(
    ("others", "policy"),
    [
        ([result("sla", 99, 5.0), result("static:2,2", 96, 4.0)], "static:2,2"),
        ([result("sla", 94, 4.0)], "sla"),
        ([result("sla", 71, 4.0)], "load"),
    ],
    ids=["the cheapest that keeps it", "the nearest to it", "no change for a point"],
)
def test_a_broken_promise_is_answered_by(others, policy):
    assert recommendation([result("load", 70, 4.0), *others], PROMISED).policy == policy


@pytest.mark.parametrize(("gpus", "policy"), [(3.7, "sla"), (3.9, "load"), (4.5, "load")])
def test_a_kept_promise_is_only_left_for_more_than_a_twentieth_of_the_gpus(gpus, policy):
    results = [result("load", 97, 4.0), result("sla", 96, gpus), result("static:1,1", 60, 2.0)]
    assert recommendation(results, PROMISED).policy == policy


def test_it_says_what_to_set_and_what_is_gained():
    results = [result("load", 70, 4.0), result("sla", 99, 5.0)]
    assert recommendation(results, PROMISED).words == (
        "set --Planner.policy=sla: 99.0% in time with 5.0 GPUs, where load had 70.0% in time with 4.0 GPUs. "
        "It keeps the promise"
    )
    assert how_to("static:2,1") == "stop scaling and keep 2 prefill and 1 decode workers"
    assert how_to("static:3") == "stop scaling and keep 3 workers"


def test_the_own_policy_is_the_first_that_is_tried_and_stands_once():
    assert tried_beside("sla") == ("sla", "load")
    assert tried_beside("both") == ("both", "load", "sla")


@pytest.mark.parametrize(
    ("per_worker", "gpus", "mean", "tried"),
    [
        ({Role.PREFILL: 1, Role.DECODE: 1}, 8, 3.4, ("static:1,3", "static:2,2", "static:3,1")),
        ({Role.PREFILL: 1, Role.DECODE: 1}, 8, 2.001, ("static:1,1",)),
        ({Role.PREFILL: 1, Role.DECODE: 2}, 8, 5.0, ("static:1,2", "static:3,1")),
        ({Role.PREFILL: 1, Role.DECODE: 1}, 3, 5.0, ("static:1,2", "static:2,1")),
        ({Role.DECODE: 2}, 8, 4.2, ("static:2",)),
        ({Role.DECODE: 4}, 8, 3.0, ()),
    ],
)
def test_splits_that_stand_still_take_the_gpus_that_were_held_on_average(per_worker, gpus, mean, tried):
    found = standing_beside(result("load", 70, mean), per_worker, gpus)
    assert sorted(found) == sorted(tried)


def test_nothing_stands_beside_a_recording_without_length():
    empty = Result("load", Outcome(Slo(500, 50)), 0.0, 0.0, 0.0, 0, 0)
    assert standing_beside(empty, {Role.DECODE: 1}, 8) == ()
