"""A planner recommends by its graph's recording, once a day, and never because of a fault of that."""

import asyncio
import json
import logging

import pytest

from dynaplan.domain.errors import TemporaryError
from dynaplan.domain.settings.planner import PlannerSettings
from dynaplan.planner.recommending import recommend_daily
from tests.fakes.clock import LoopClock

SIM = {"Frontend": {"record-traffic": "traffic.jsonl"}, "Common": {"api-key": "s3cret"}}
DAY_S = 86400.0


class Recommender:
    """Notes when it is asked, as ``adapters.recorders.recommending.Recommender`` would start a process."""

    def __init__(self, age_s: float | None = None, fault: Exception | None = None) -> None:
        self.asked: list[tuple[float, str, list[str]]] = []
        self._fault = fault
        self._made_s = None if age_s is None else -age_s

    def age_s(self) -> float | None:
        now_s = asyncio.get_running_loop().time()
        return None if self._made_s is None else now_s - self._made_s

    async def recommend(self, config, arguments):
        self._made_s = asyncio.get_running_loop().time()
        self.asked.append((self._made_s, config, list(arguments)))
        if self._fault:
            raise self._fault
        return "stay with load"


async def lived(recommender: Recommender, config=SIM, hours: float = 50, **settings) -> list[float]:
    """The hours at which a planner that lives so long recommends."""
    began_s = asyncio.get_running_loop().time()
    if recommender._made_s is not None:
        recommender._made_s += began_s
    life = recommend_daily(PlannerSettings(**settings), config, recommender, LoopClock())
    try:
        async with asyncio.timeout(hours * 3600):
            await life
    except TimeoutError:
        pass
    return [round((at_s - began_s) / 3600, 3) for at_s, _, _ in recommender.asked]


@pytest.mark.looptime
async def test_it_recommends_after_an_hour_and_then_once_a_day():
    assert await lived(Recommender()) == [1, 25, 49]


@pytest.mark.looptime
async def test_a_planner_that_starts_again_waits_for_the_rest_of_the_day():
    assert await lived(Recommender(age_s=20 * 3600)) == [4, 28]


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (SIM, {"recommend_every_s": 0.0}),
        (SIM | {"VllmWorker": {"engine": "vllm"}}, {}),
    ],
    ids=["switched off", "an engine without a profile"],
)
async def test_nothing_is_recommended(config, settings):
    assert await lived(Recommender(), config, **settings) == []


@pytest.mark.looptime
async def test_the_simulation_is_of_the_graph_without_its_secrets_on_its_gpus():
    recommender = Recommender()
    config = SIM | {"VllmWorker": {"engine": "vllm"}, "Planner": {"profile_results_dir": "mine"}}
    settings = {"max_gpu_budget": 4, "startup_time_s": 90.0, "profile_results_dir": "/srv/mine"}
    await lived(recommender, config, 2, **settings)
    [(_, text, arguments)] = recommender.asked
    assert json.loads(text)["Frontend"] == SIM["Frontend"] and "s3cret" not in text
    assert " ".join(arguments) == (
        "--trace traffic.jsonl --last 86400 --gpus 4 --startup-time 90 --profile /srv/mine"
    )


@pytest.mark.looptime
@pytest.mark.parametrize("fault", [TemporaryError("no such file"), OSError("disk full")])
async def test_a_fault_is_said_and_tried_again_a_day_later(fault, caplog):
    with caplog.at_level(logging.WARNING):
        assert await lived(Recommender(fault=fault), hours=26) == [1, 25]
    assert str(fault) in caplog.text
