"""Looking at a deployment again and again."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynaplan.cli import status_poller
from dynaplan.cli.status_document import DeploymentState
from dynaplan.cli.status_poller import WINDOW_S, LoadWindow, StatusPoller, percentile_ms
from dynaplan.contract.gpus import GpuActivity, GpuProcess, GpuUse
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.fleet import deployments
from dynaplan.fleet.deployments import RunningDeployment
from dynaplan.fleet.rules.statefile import with_fleet
from dynaplan.process.identity import ProcessIdentity
from dynaplan.store.instances import Instance
from tests.unit.fleet.rules.graphs import worker
from tests.unit.fleet.rules.test_statefile import new_document

WORKER = replace(worker("VllmWorker", gpus=(0,)), pid=2**22 + 1, started_at=1)


class OneWorker:
    """A store and a worker that generates ten tokens between two looks; copies ``StatusReader``."""

    def __init__(self, namespace: str) -> None:
        self.generated = 0
        self.lists = 0

    async def read_store(self) -> DeploymentState:
        self.lists += 1
        card = {"role": "decode", "model": "llama"}
        instance = Instance("dynamo", "VllmWorker", "generate", 1, "http://x", worker=WORKER.name, card=card)
        frontend = Instance("dynamo", "Frontend", "http", 2, "http://y", worker="dynamo_Frontend")
        return DeploymentState(registered=(instance, frontend), fleet={"free_gpus": [1]})

    async def read_loads(self, registered: list[Instance]) -> dict[str, WorkerLoad]:
        self.generated += 10
        return {each.worker: WorkerLoad(generated_tokens=self.generated) for each in registered}

    async def close(self) -> None: ...


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[float]]:
    document = with_fleet(
        {
            **new_document(),
            "addresses": {"frontend_url": "http://z", "log_dir": str(tmp_path), "runtime_dir": str(tmp_path)},
        },
        [WORKER],
    )
    found = RunningDeployment(tmp_path / "dynamo.json", document, ProcessIdentity(5, 1, "boot"))
    now = [100.0]
    monkeypatch.setattr(status_poller, "connect", lambda namespace: found)
    monkeypatch.setattr(deployments, "find_deployment", lambda namespace: found)
    monkeypatch.setattr(status_poller, "StatusReader", OneWorker)
    monkeypatch.setattr(status_poller.time, "monotonic", lambda: now[0])
    use = GpuUse(2**30, (GpuProcess(os.getpid(), "python", os.getuid()), GpuProcess(0)))
    monkeypatch.setattr(status_poller, "uses_reader", lambda gpus: lambda: {0: use})
    monkeypatch.setattr(status_poller, "activity_reader", lambda gpus: lambda: {0: GpuActivity(0.5, 300.0)})
    yield now


async def test_two_looks_tell_the_tokens_and_one_the_gpus(seconds: list[float]) -> None:
    live = StatusPoller(None)
    first = await live.poll()
    seconds[0] += 1.0
    second = await live.poll()
    await live.close()
    assert [row["tokens_per_s"] for row in (first["workers"][0], second["workers"][0])] == [None, 10.0]
    assert (second["free_gpus"], second["models"], second["load"]) == ([1], ["llama"], None)
    shown: dict[str, Any] = second["gpus"][0]
    assert (shown["used_bytes"], shown["utilisation"], shown["watts"]) == (2**30, 0.5, 300.0)
    [other] = shown["others"]
    assert other.startswith(f"{pwd.getpwuid(os.getuid()).pw_name}: {sys.executable} ")
    assert other.endswith(f" ({os.getpid()})")
    assert shown["workers"] == [WORKER.name]


async def test_power_is_that_of_the_models_gpus_and_its_energy_by_the_frontends_tokens(
    seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [0]

    async def get(self: StatusPoller, url: str) -> bytes:
        tokens[0] += 500
        return b'dynamo_frontend_output_tokens_total{dynamo_namespace="dynamo",model="llama"} %d' % tokens[0]

    monkeypatch.setattr(StatusPoller, "_get", get)
    monkeypatch.setattr(status_poller, "public_urls", lambda registered: ["http://y"])
    live = StatusPoller(None)
    assert (await live.poll())["power"] == {"watts": 300.0, "wh_per_1000_tokens": None}
    seconds[0] += 12.0
    # 300 W for 12 s are a watt-hour.
    assert (await live.poll())["power"] == {"watts": 300.0, "wh_per_1000_tokens": pytest.approx(2.0)}
    await live.close()


async def test_a_frontend_that_does_not_answer_once_brings_no_load_that_it_did_not_have(
    seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = set[str]()

    async def get(self: StatusPoller, url: str) -> bytes:
        if url in silent:
            return b""
        labels = '{dynamo_namespace="dynamo",model="llama"}'
        names = ("requests_total", "output_tokens_total", "output_sequence_tokens_sum")
        return "".join(f"dynamo_frontend_{name}{labels} {10 * seconds[0]}\n" for name in names).encode()

    monkeypatch.setattr(StatusPoller, "_get", get)
    monkeypatch.setattr(status_poller, "public_urls", lambda registered: ["http://y", "http://z"])
    live, shown = StatusPoller(None), []
    for failing in ((), (), ("http://y/metrics",), (), ("http://y/metrics", "http://z/metrics"), ()):
        silent.clear()
        silent.update(failing)
        shown.append(await live.poll())
        seconds[0] += 5.0
    await live.close()
    assert shown[3]["load"]["tokens_per_s"] == shown[5]["load"]["tokens_per_s"] == 20.0
    # 300 W for 5 s and 100 tokens.
    assert [shown[at]["power"]["wh_per_1000_tokens"] for at in (1, 3, 5)] == [pytest.approx(25 / 6)] * 3


async def test_the_store_is_asked_every_other_second_only(seconds: list[float]) -> None:
    live = StatusPoller(None)
    for _ in range(4):
        await live.poll()
        seconds[0] += 1.0
    reader: Any = live._reader
    assert reader.lists == 2
    await live.close()


async def test_each_model_has_a_load_and_all_together_have_one(
    seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\n".join(
        f'dynamo_frontend_{{name}}{{{{dynamo_namespace="dynamo",model="{model}"}}}} {{{model}}}'
        for model in ("ant", "bee")
    )
    live = StatusPoller(None)
    assert live._load("") is None, "one reading is no rate"
    for at_s, counts in enumerate(({"ant": 0, "bee": 0}, {"ant": 1, "bee": 4})):
        said = text.format(name="requests_started_total", **counts).encode()
        for model, read in live._counts([said, said]).items():  # of two frontends
            live._loads.setdefault(model, LoadWindow()).add(2.0 * at_s, read)
    rates = {name: load["requests_per_s"] for name in ("", "ant", "bee") if (load := live._load(name))}
    assert rates == {"": 5.0, "ant": 1.0, "bee": 4.0}
    await live.close()


async def test_the_first_seconds_of_a_look_have_no_rate_of_requests(
    seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = b'dynamo_frontend_requests_started_total{dynamo_namespace="dynamo",model="ant"} 5'

    async def get(self: StatusPoller, url: str) -> bytes:
        return said

    monkeypatch.setattr(StatusPoller, "_get", get)
    monkeypatch.setattr(status_poller, "public_urls", lambda registered: ["http://y"])
    live = StatusPoller(None)
    assert (await live.poll())["load"] is None
    seconds[0] += status_poller.SLOW_POLL_S
    assert (await live.poll())["load"]["requests_per_s"] == 0.0
    await live.close()


async def test_an_engine_that_began_anew_has_no_rate_yet(seconds: list[float]) -> None:
    live = StatusPoller(None)
    await live.poll()
    reader: Any = live._reader
    reader.generated = -10
    seconds[0] += 1.0
    assert (await live.poll())["workers"][0]["tokens_per_s"] is None
    await live.close()


BOUNDS = ("0.1", "0.2", "+Inf")


def counts(
    requests: float, buckets: tuple[float, float, float], tokens: float = 0.0
) -> dict[tuple[str, str], float]:
    name = "time_to_first_token_seconds"
    own = {(f"{name}_bucket", bound): count for bound, count in zip(BOUNDS, buckets, strict=True)}
    own |= {(f"{name}_count", ""): buckets[-1], (f"{name}_sum", ""): 0.1 * buckets[-1]}
    itl = {("inter_token_latency_seconds_count", ""): tokens, ("inter_token_latency_seconds_sum", ""): 0.0}
    return {("requests", ""): requests, **own, **itl}


def test_two_readings_give_rates_means_and_percentiles() -> None:
    window = LoadWindow()
    window.add(0.0, counts(100, (50, 50, 50), 1000))
    assert window.figures() is None
    window.add(10.0, counts(150, (60, 100, 100), 1950))
    figures = window.figures()
    assert figures
    assert (figures.window_s, figures.requests_per_s, figures.tokens_per_s) == (10.0, 5.0, 100.0)
    assert figures.ttft_mean_ms == pytest.approx(100.0)
    # 10 of 50 lie below 100 ms and 40 evenly up to 200 ms: 47.5 of them are below 193.75 ms.
    assert figures.ttft_percentile_ms == pytest.approx(193.75)
    assert (figures.itl_mean_ms, figures.itl_percentile_ms) == (0.0, None)


def test_the_times_are_at_the_percentiles_that_the_targets_name() -> None:
    window = LoadWindow()
    window.add(0.0, counts(0, (0, 0, 0)))
    window.add(10.0, counts(50, (10, 50, 50)))
    figures = window.figures({"ttft_percentile": 50.0, "itl_percentile": 95.0})
    assert figures
    # 10 of 50 lie below 100 ms and 40 evenly up to 200 ms: 25 of them are below 137.5 ms.
    assert figures.ttft_percentile_ms == pytest.approx(137.5)


def test_tokens_of_answers_without_a_stream_are_counted_too() -> None:
    window = LoadWindow()
    window.add(0.0, {("requests", ""): 1, ("output_sequence_tokens_sum", ""): 100.0})
    window.add(10.0, {("requests", ""): 2, ("output_sequence_tokens_sum", ""): 400.0})
    figures = window.figures()
    assert figures
    assert (figures.tokens_per_s, figures.ttft_mean_ms) == (30.0, None)


def test_an_idle_minute_has_no_times() -> None:
    window = LoadWindow()
    for at_s in (0.0, 5.0):
        window.add(at_s, counts(7, (7, 7, 7)))
    figures = window.figures()
    assert figures
    assert (figures.requests_per_s, figures.ttft_mean_ms, figures.ttft_percentile_ms) == (0.0, None, None)


def test_only_the_last_minute_counts() -> None:
    window = LoadWindow()
    for second in range(0, 130, 5):
        window.add(float(second), counts(0 if second < 60 else 600, (0, 0, 0)))
    figures = window.figures()
    assert figures
    assert (figures.window_s, figures.requests_per_s) == (WINDOW_S, 0.0)


def test_frontends_that_began_anew_begin_the_window() -> None:
    window = LoadWindow()
    window.add(0.0, counts(100, (100, 100, 100)))
    window.add(5.0, counts(3, (3, 3, 3)))
    assert window.figures() is None


def test_a_percentile_above_the_last_bound_is_that_bound() -> None:
    assert percentile_ms(counts(0, (0, 1, 10)), "time_to_first_token_seconds", 95) == 200.0
    finite = {key: value for key, value in counts(0, (1, 2, 2)).items() if key[1] != "+Inf"}
    assert percentile_ms(finite, "time_to_first_token_seconds", 100) == 200.0
