"""A deployment is simulated as it stands: its options, its workers, its policy."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.cli.bench.prediction import predict
from dynaplan.fleet.counts import Targets
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.simulation.run import ClosedLoop
from dynaplan.util.errors import ConfigError

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
    assert (options.policies, options.first, options.gpus) == (("both",), Targets(1, 2), 4)
    assert options.is_disaggregated
    assert options.slo.ttft_ms == 321
    assert options.engine["max-num-seqs"] == 7
    assert predicted.notes == (
        "simulated with 1 prefill and 2 decode workers at the beginning, policy both.",
        "Queued prompts are computed by deadline, 321 ms (Planner.ttft).",
    )


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
