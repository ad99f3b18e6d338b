"""What a simulation is made of: the best static split, and the engine."""

from dataclasses import replace

import pytest

from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.policy_runs import best_static, run_simulations
from dynaplan.simulation.outcome import Slo
from dynaplan.util.errors import ConfigError

OPTIONS = SimulateOptions(
    trace="poisson:rate=2,duration=20,isl=500,osl=20",
    policies=("sla",),
    gpus=4,
    slo=Slo(500.0, 50.0),
    planner={"adjustment-interval": 5},
)


def test_the_best_split_that_stands_still_is_the_cheapest_that_keeps_the_promise() -> None:
    found = best_static(OPTIONS)
    assert found.best.is_promise_kept
    assert found.best.workers.prefill + found.best.workers.decode == 2


def test_a_start_up_time_of_the_engine_is_refused_as_it_is_an_option_of_the_simulation() -> None:
    with pytest.raises(ConfigError, match="startup-time of the engine is 3"):
        list(run_simulations(replace(OPTIONS, engine={"startup-time": 3})))


SET_BY_TARGETS = {"max-running-requests": 4}, {"adjust-knobs": True}


@pytest.mark.parametrize("planner", SET_BY_TARGETS, ids=str)
@pytest.mark.parametrize("policies", [("load",), ("formula",), ("load", "formula")])
def test_what_no_policy_can_set_of_workers_is_refused_as_serve_refuses_it(policies, planner) -> None:
    options = replace(OPTIONS, policies=policies, planner=planner)
    with pytest.raises(ConfigError, match=f"{next(iter(planner))} is "):
        list(run_simulations(options))


@pytest.mark.parametrize("planner", SET_BY_TARGETS, ids=str)
def test_beside_a_policy_that_sets_it_the_others_go_without(planner) -> None:
    options = replace(OPTIONS, policies=("load", "best-static", "sla"), planner=planner)
    assert len(list(run_simulations(options))) == 3
