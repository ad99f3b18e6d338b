"""``dynaplan bench`` as a user types it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dynaplan.cli import bench
from dynaplan.cli.bench import notes, predict, table
from dynaplan.cli.bench_measurement import Measurement, RequestCounters
from dynaplan.cli.simulate import text_table
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.fleet import deployments
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.lab.profiling.load.completions import Answer, AnswerStream, RequestFailed
from dynaplan.simulation.outcome import Outcome, Slo
from dynaplan.simulation.run import ClosedLoop, Result
from dynaplan.util.errors import ConfigError, DeploymentError


def run(*arguments: str) -> Any:
    return CliRunner().invoke(bench.command, arguments, standalone_mode=False)


def test_clients_and_a_trace_are_two_loads() -> None:
    error = run("--clients", "2", "--trace", "poisson").exception
    assert isinstance(error, ConfigError)
    assert "two loads" in str(error)


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60), ("90", 90), ("1h30m", 5400)])
def test_a_duration_is_written_as_people_write_it(text: str, seconds: int) -> None:
    context = click.Context(bench.command)
    assert bench.duration_s(context, bench.command.params[0], text) == seconds


def test_a_duration_of_nothing_is_refused() -> None:
    assert "is no duration" in str(run("--for", "0s").exception)


def test_a_trace_that_cannot_be_read_is_named_before_anything_is_sent() -> None:
    assert "no load is called" in str(run("--trace", "sinus").exception)


def test_without_a_deployment_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(namespace: str | None) -> Any:
        raise DeploymentError("no deployment is running here")

    monkeypatch.setattr(deployments, "find_deployment", none)
    assert "no deployment" in str(run().exception)


def test_a_service_that_does_not_answer_is_named() -> None:
    error = run("--url", "http://127.0.0.1:9/v1/", "--for", "1s").exception
    assert isinstance(error, DeploymentError)
    assert "http://127.0.0.1:9 does not answer" in str(error)


def measured(**changes: Any) -> Measurement:
    counters = RequestCounters(Slo(500.0, 50.0), 0.0)
    counters.answered(AnswerStream(), 1.0, Answer(1.0, (1.2, 2.2), 30, 101), TracedRequest(0.0, 30, 101))
    return Measurement(counters, "m", 10.0, **{"client_load": 0.1, "is_interrupted": False, **changes})


def test_the_measured_row_stands_above_the_simulated_one_and_leaves_out_what_nobody_saw() -> None:
    predicted = Result("load", Outcome(Slo(), requests=3, both_met=3), 0.5, 10.0, 10.0, 2, 0)
    rows = table(measured(), None, predicted)
    assert [row["policy"] for row in rows] == ["measured", "simulated"]
    assert rows[1]["simulated_policy"] == "load"
    assert (rows[0]["gpu_hours"], rows[0]["hit_rate"]) == (None, None)
    lines = text_table(rows).splitlines()
    assert "GPU-HOURS" in lines[0]
    assert " - " in lines[1]
    assert " - " not in lines[2]


def test_nothing_is_noted_of_a_measurement_in_order() -> None:
    assert list(notes(measured(), (30, 101))) == []


def test_failures_other_lengths_and_a_busy_client_are_noted() -> None:
    busy = measured(client_load=0.9)
    busy.counters.failed(AnswerStream(), RequestFailed("503 no_worker", "none is there"))
    busy.counters.open.add(AnswerStream())
    busy.counters.answers_of_other_length = busy.counters.prompts_of_other_length = 2
    busy.counters.max_late_s = 0.5
    lines = list(notes(busy, (30, 101)))
    assert lines[0] == "failed: 1 x 503 no_worker: none is there"
    assert [
        next(word for word in ("open", "answers", "prompts", "core", "500 ms") if word in each)
        for each in lines[1:]
    ] == ["open", "answers", "prompts", "core", "500 ms"]


GIVEN = {"ttft": None, "itl": None, "seed": 1, "profile": None}


def deployment(tmp_path: Any, workers: list[Worker], **sections: Any) -> Any:
    """What is found of a running deployment."""
    config = json.dumps(sections)
    resources = {"gpus": [{"index": index, "uuid": f"GPU-{index}"} for index in range(4)]}
    environment = {"DYNAMO_SERVICE_CONFIG": config, "SYSTEM_RESOURCES": resources}
    return SimpleNamespace(
        document={"namespace": "ns", "environment": environment, "components": {}},
        workers=tuple(workers),
        statefile=tmp_path / "ns.json",
    )


def worker(role: Role, component: str, number: int = 0, state: WorkerState = WorkerState.READY) -> Worker:
    gpus = (number,) if role in (Role.DECODE, Role.PREFILL) else ()
    return Worker(f"ns_{component}_{number}", component, role, state, gpus)


def test_the_simulation_has_the_deployments_workers_policy_gpus_and_options(tmp_path: Any) -> None:
    found = deployment(
        tmp_path,
        [
            worker(Role.PLANNER, "Planner"),
            worker(Role.DECODE, "VllmWorker"),
            worker(Role.DECODE, "VllmWorker", 1),
            worker(Role.DECODE, "VllmWorker", 2, WorkerState.DRAINING),
            worker(Role.PREFILL, "PrefillWorker", 3),
        ],
        Planner={"policy": "both", "ttft": 321},
        VllmWorker={"max-num-seqs": 7},
        Frontend={"remote-prefill": True},
    )
    predicted = predict(found, GIVEN)
    options = predicted.options
    assert (options.policies, options.first, options.gpus) == (("both",), PoolSizes(1, 2), 4)
    assert options.is_disaggregated
    assert options.slo.ttft_ms == 321
    assert options.engine["max-num-seqs"] == 7
    assert predicted.notes == (
        "simulated with 1 prefill and 2 decode workers at the beginning, policy both.",
        "Queued prompts are computed by deadline, 321 ms (Planner.ttft).",
    )


def test_gpus_that_others_have_are_none_that_the_planner_adds_workers_on(tmp_path: Any) -> None:
    planner, engine = worker(Role.PLANNER, "Planner"), worker(Role.DECODE, "VllmWorker")
    leaving = worker(Role.DECODE, "VllmWorker", 1, WorkerState.DRAINING)
    found = deployment(tmp_path, [planner, engine, leaving], Planner={"policy": "load"}, VllmWorker={})
    scarce = predict(found, GIVEN, free=1)
    assert scarce.options.gpus == 3
    assert scarce.notes[0].startswith("simulated with 1 worker at the beginning, policy load.")
    assert scarce.notes[0].endswith("Others have 1 of its 4 GPUs: left out.")
    everything = predict(found, GIVEN, free=2)
    assert everything.options.gpus == 4
    assert "left out" not in everything.notes[0]


def test_all_gpus_count_where_the_free_ones_are_not_known(tmp_path: Any) -> None:
    found = deployment(tmp_path, [worker(Role.DECODE, "VllmWorker")], VllmWorker={})
    assert predict(found, GIVEN).options.gpus == 4


def test_without_a_planner_the_workers_stay_and_workers_of_other_names_are_known(tmp_path: Any) -> None:
    found = deployment(
        tmp_path,
        [worker(Role.DECODE, "MyWorker"), worker(Role.DECODE, "MyWorker", 1)],
        MyWorker={"max-num-seqs": 5},
    )
    predicted = predict(found, GIVEN)
    assert predicted.options.policies == ("static:2",)
    assert predicted.options.engine["max-num-seqs"] == 5
    assert "no planner" in predicted.notes[0]
    assert predicted.result(ClosedLoop(2, 100, 20, 5.0)).outcome.requests > 2


def test_a_real_engine_is_simulated_by_the_planners_profile_or_not_at_all(tmp_path: Any) -> None:
    workers = [worker(Role.PLANNER, "Planner"), worker(Role.DECODE, "VllmWorker")]
    engine = {"engine": "vllm", "model": "some/model"}
    with pytest.raises(ConfigError, match="no profile of this vllm"):
        predict(deployment(tmp_path, workers, VllmWorker=engine), GIVEN)
    named = "h200_sxm-Llama-3.1-8B-Instruct-FP8"
    found = deployment(tmp_path, workers, VllmWorker=engine, Planner={"profile-results-dir": named})
    assert predict(found, GIVEN).options.engine["profile"] == named
