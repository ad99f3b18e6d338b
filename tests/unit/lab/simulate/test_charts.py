"""The charts of simulations, as the pictures of the documents show them."""

import re

from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.policy_runs import run_simulations
from dynaplan.simulation.outcome import Slo
from tests.bench.pictures import picture

OPTIONS = SimulateOptions(
    trace="step:low=2,high=14,at=20,duration=60,isl=2000,osl=60",
    policies=("load",),
    gpus=6,
    startup_time_s=10.0,
    slo=Slo(300.0, 20.0),
    planner={"adjustment-interval": 5, "metric-pulling-interval": 1},
)


def test_a_picture_is_one_svg_that_tells_its_first_decisions():
    (result,) = run_simulations(OPTIONS)
    text = picture(OPTIONS, result, "Load & more", ["decode", "ttft_ms"])

    assert text.startswith("<svg")
    assert "Load &amp; more" in text
    assert result.events[0].why.split()[0] in text
    assert re.findall(r'data-key="(\w+)"', text) == ["decode", "ttft_ms"]
