"""ARIMA and Prophet in a process of their own.

With a fake ``pmdarima`` that copies the interface that is used (``auto_arima`` gives a model with ``order``
and ``predict(n_periods)``) and nothing of its mathematics; its first value tells it what to do. And with the
real libraries where they are installed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from dynaplan.config.settings.planner import Forecast, ForecastSettings
from dynaplan.planner.forecasting.library_forecaster import LibraryForecaster, make_forecaster
from dynaplan.planner.forecasting.series import MAX_LOG
from dynaplan.process.process_table import group_members
from dynaplan.util.errors import ConfigError
from tests.fakes.polling import eventually
from tests.unit.planner.forecasting.curves import curve, wave

FAKE = """
import json, os, subprocess, time

def auto_arima(values, suppress_warnings, error_action):
    what = float(values[0])
    if what == 10: print("noise on the standard output")
    if what == 1: raise RuntimeError("singular matrix")
    if what == 2: os._exit(7)
    if what == 3:
        subprocess.Popen(["sleep", "60"])
        time.sleep(60)
    return Model(values, (0, 1, 0) if what == 4 else (1, 0, 0), float("nan") if what == 5 else None)

class Model:
    def __init__(self, values, order, answer):
        self.values, self.order, self.answer = values, order, answer

    def predict(self, n_periods):
        if self.answer is not None: return [self.answer] * n_periods
        if self.values[0] == 6.0: return [-5.0] * n_periods
        if self.values[0] == 7.0: return [float(os.environ["OMP_NUM_THREADS"])] * n_periods
        return [float(self.values[-1]) + step for step in range(1, n_periods + 1)]
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a fake library, which this process and its children find first."""
    directory = tmp_path / "library"
    directory.mkdir()
    (directory / "pmdarima.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(directory))
    monkeypatch.syspath_prepend(str(directory))
    return directory


@pytest.fixture
async def arima(fake: Path) -> AsyncIterator[LibraryForecaster]:
    forecaster = LibraryForecaster(ForecastSettings(load_predictor="arima", load_predictor_deadline_s=60), 30)
    yield forecaster
    await forecaster.close()


def history(first: float, last: float = 20.0) -> list[float | None]:
    return [first, 11.0, 12.0, None, 14.0, last]


def children() -> list[psutil.Process]:
    return [
        each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE
    ]


def is_gone(directory: str) -> bool:
    return not Path(directory).exists()


async def test_the_library_answers_in_a_process_with_one_thread_that_ends_with_the_forecaster(
    arima: LibraryForecaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert await arima.forecast(history(10), 3) == Forecast(23.0, "arima", "arima(1, 0, 0)")
    assert (await arima.forecast(history(7), 1)).value == 1.0
    assert "OMP_NUM_THREADS" not in os.environ
    assert len(children()) == 1
    await arima.close()
    assert children() == []


async def test_an_order_without_memory_is_done_again_with_logarithms(arima: LibraryForecaster) -> None:
    told = await arima.forecast(history(4), 1)
    assert told.why == "arima(1, 0, 0) of the logarithm"
    assert told.value == pytest.approx(math.expm1(math.log1p(20) + 1))
    assert (await arima.forecast(history(4), 800)).value == math.expm1(MAX_LOG), "no float is larger"


async def test_several_forecasts_at_once_are_computed_one_after_another(arima: LibraryForecaster) -> None:
    told = await asyncio.gather(*(arima.forecast(history(10, last), 1) for last in (1.0, 2.0, 3.0)))
    assert [each.value for each in told] == [2.0, 3.0, 4.0]


async def test_a_forecast_below_nothing_is_nothing(arima: LibraryForecaster) -> None:
    assert (await arima.forecast(history(6), 1)).value == 0.0


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (1.0, "arima failed: RuntimeError: singular matrix"),
        (2.0, "arima failed: its process ended with 7"),
        (5.0, "arima failed: it answered nan"),
    ],
)
async def test_a_failure_is_the_last_value_and_the_next_forecast_is_tried_again(
    arima: LibraryForecaster, first: float, why: str
) -> None:
    told = await arima.forecast(history(first), 1)
    assert (told.value, told.method, told.why) == (20.0, "constant", f"the last value: {why}")
    assert (await arima.forecast(history(10), 1)).value == 21.0


async def test_an_error_of_the_library_does_not_cost_the_process_that_loaded_it(
    arima: LibraryForecaster,
) -> None:
    await arima.forecast(history(10), 1)
    before = children()
    await arima.forecast(history(1), 1)
    await arima.forecast(history(10), 1)
    assert children() == before


async def test_one_that_is_late_is_the_last_value_and_its_process_is_killed_with_its_children(
    fake: Path,
) -> None:
    settings = ForecastSettings(load_predictor="arima", load_predictor_deadline_s=0.6)
    forecaster = LibraryForecaster(settings, 30)
    try:
        while (await forecaster.forecast(history(10), 1)).method != "arima":
            pass  # its process is loading, on a busy machine for longer than the deadline
        [process] = children()
        told = await forecaster.forecast(history(3), 1)
        assert (told.value, told.why) == (20.0, "the last value: arima took longer than 0.6 s")
        assert children() == []
        await eventually(lambda: group_members(process.pid) == ())  # the kernel ends its children in its time
    finally:
        await forecaster.close()


async def test_a_library_that_hangs_costs_all_that_is_asked_at_once_one_deadline_and_one_process(
    fake: Path,
) -> None:
    with (fake / "pmdarima.py").open("a") as library:
        library.write(f"open({str(fake / 'processes')!r}, 'a').write('x')\n")
    settings = ForecastSettings(load_predictor="arima", load_predictor_deadline_s=0.6)
    forecaster = LibraryForecaster(settings, 30)
    try:
        while (await forecaster.forecast(history(10), 1)).method != "arima":
            pass  # its process is loading
        told = await forecaster.forecast_all([(history(3, last), 1) for last in (21.0, 22.0, 23.0)])
        assert [each.value for each in told] == [21.0, 22.0, 23.0]
        assert (fake / "processes").read_text() == "x"
    finally:
        await forecaster.close()


async def test_a_library_that_does_not_load_is_the_last_value_with_the_reason(fake: Path) -> None:
    (fake / "pmdarima.py").write_text("raise ImportError('numpy is too new')")
    forecaster = LibraryForecaster(ForecastSettings(load_predictor="arima", load_predictor_deadline_s=60), 30)
    told = await forecaster.forecast(history(10), 1)
    await forecaster.close()
    assert told.why == "the last value: arima failed: ImportError: numpy is too new"
    assert children() == []


async def test_closing_while_the_library_loads_leaves_nothing(fake: Path) -> None:
    (fake / "pmdarima.py").write_text("import time; time.sleep(60)")
    settings = ForecastSettings(load_predictor="arima", load_predictor_deadline_s=0.2)
    forecaster = LibraryForecaster(settings, 30)
    told = await forecaster.forecast(history(10), 1)
    assert told.why == "the last value: arima is still loading after 0.2 s"
    await forecaster.close()
    assert children() == []


async def test_a_short_or_unchanging_history_starts_no_process(arima: LibraryForecaster) -> None:
    told = await arima.forecast([10.0, None, 12.0], 1)
    assert (told.value, told.why) == (12.0, "the last value: arima is warming up, 2 of 5 measurements")
    told = await arima.forecast([8.0] * 10, 1)
    assert (told.value, told.why) == (8.0, "the last value: arima of a series that does not change")
    assert not (await arima.forecast([None], 1)).is_known
    assert children() == []


async def test_the_secrets_of_the_planner_stay_there(
    fake: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DYNAPLAN_WORKER_TOKEN", "secret")
    (fake / "pmdarima.py").write_text(
        "import json, os, pathlib\n"
        f"pathlib.Path({str(tmp_path / 'seen')!r}).write_text(json.dumps(dict(os.environ)))"
    )
    forecaster = LibraryForecaster(ForecastSettings(load_predictor="arima", load_predictor_deadline_s=60), 30)
    await forecaster.forecast(history(10), 1)
    await forecaster.close()
    seen = json.loads((tmp_path / "seen").read_text())
    assert "secret" not in seen.values()
    assert is_gone(seen["TMPDIR"])


def test_a_library_that_is_missing_is_the_users_error_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"(?s)'prophet'.*not installed.*pip install prophet"):
        make_forecaster(ForecastSettings(load_predictor="prophet"), 30)


async def test_the_cores_own_methods_need_no_process() -> None:
    forecaster = make_forecaster(ForecastSettings(load_predictor="kalman"), 30)
    assert (await forecaster.forecast([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 1)).method == "kalman"
    await forecaster.close()
    assert children() == []


# -- the real libraries ----------------------------------------------------------------------------------


def installed(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None,
        reason=f"{module} is an extra, and heavy: not installed here",
    )


@pytest.mark.parametrize(
    "method",
    [pytest.param("arima", marks=installed("pmdarima")), pytest.param("prophet", marks=installed("prophet"))],
)
async def test_the_real_library_follows_a_ramp(method: str) -> None:
    settings = ForecastSettings(load_predictor=method, load_predictor_deadline_s=100)
    forecaster = LibraryForecaster(settings, 30)
    ramp: list[float | None] = [*curve(lambda index: 100.0 + 10 * index, 40, noise=0.01)]
    ramp[20] = None
    told = await forecaster.forecast(ramp, 3)
    await forecaster.close()
    assert told.method == method
    assert told.value == pytest.approx(100 + 10 * 42, rel=0.1)


@installed("pmdarima")
async def test_real_arima_follows_a_wave() -> None:
    settings = ForecastSettings(load_predictor="arima", load_predictor_deadline_s=100)
    forecaster = LibraryForecaster(settings, 30)
    told = await forecaster.forecast(curve(wave, 50, noise=0.02), 3)
    await forecaster.close()
    assert told.value == pytest.approx(wave(52), rel=0.25)
