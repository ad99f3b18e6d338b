"""ARIMA and Prophet in a simulation: a library in a process of its own foretells, virtual time stands still.

With a fake ``pmdarima`` that copies the interface that is used (``auto_arima`` gives a model with ``order``
and ``predict(n_periods)``), and with the real libraries where they are installed.
"""

import importlib.util
from pathlib import Path

import psutil
import pytest

from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.policy_runs import run_simulations
from dynaplan.simulation.outcome import Slo
from dynaplan.simulation.run import Result
from dynaplan.util.errors import ConfigError

FORETOLD = 1e5
FAKE = f"""
def auto_arima(values, suppress_warnings, error_action):
    return Model()

class Model:
    order = (1, 0, 0)

    def predict(self, n_periods):
        return [{FORETOLD}] * n_periods
"""


def simulated(predictor: str) -> Result:
    planner = {"load-predictor": predictor, "adjustment-interval": 10}
    load = "poisson:rate=4,duration=90,isl=2000,osl=20"
    slo = Slo(ttft_ms=500, itl_ms=20)
    [result] = run_simulations(SimulateOptions(load, ("sla",), slo=slo, planner=planner))
    return result


def installed(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None,
        reason=f"{module} is an extra, and heavy: not installed here",
    )


def test_what_the_library_foretells_decides_and_its_process_ends_with_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pmdarima.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = psutil.Process().children()

    result = simulated("arima")

    assert any(event.after.decode + event.after.prefill == 8 for event in result.events)
    assert psutil.Process().children() == before


@pytest.mark.parametrize(("predictor", "module"), [("arima", "pmdarima"), ("prophet", "prophet")])
def test_a_library_that_is_not_installed_is_asked_for_before_anything_is_simulated(
    predictor: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))

    with pytest.raises(ConfigError, match=f"pip install {module}"):
        simulated(predictor)


@pytest.mark.parametrize(
    "predictor",
    [pytest.param("arima", marks=installed("pmdarima")), pytest.param("prophet", marks=installed("prophet"))],
)
def test_the_real_library_foretells_in_a_simulation(predictor: str) -> None:
    result = simulated(predictor)

    assert result.outcome.lost == 0
    assert result.outcome.attainment(result.outcome.both_met) > 0.9
