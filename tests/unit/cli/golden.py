"""Golden pages: what commands show of documents made up here, as a person reads it.

A page that reads otherwise fails with the difference. Where that is meant,
``python -m tests.unit.cli.golden`` writes ``tests/fixtures/pages`` anew: what git shows of it is the review.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from dynaplan.cli import doctor
from dynaplan.cli.doctor import Finding, Level
from dynaplan.cli.gpus import BoxGpu, GpuHolder, gpu_rows
from dynaplan.cli.keys_view import key_rows
from dynaplan.cli.model_needs import ModelNeeds
from dynaplan.cli.models_view import SavedKv, model_rows, models_table
from dynaplan.cli.status_view import render_page, view_of
from dynaplan.contract.gpus import Gpu, GpuActivity, GpuUse
from dynaplan.contract.holds import Hold
from dynaplan.contract.model_keys import ModelDemand, ModelReport, PoolReport, Refusal
from dynaplan.models.model import NO_CONSTRAINTS, Device
from dynaplan.models.rules.memory import Need
from dynaplan.util.amounts import GIB
from dynaplan.util.tables import text_table
from tests.unit.cli.status_documents import (
    FIGURES,
    document,
    gpu_document,
    model_document,
    worker_document,
)

DIRECTORY = Path(__file__).parents[2] / "fixtures" / "pages"
RENEWED_BY = "python -m tests.unit.cli.golden"

TARGETS = {"ttft_ms": 500.0, "itl_ms": 50.0, "ttft_percentile": 90.0, "itl_percentile": 95.0}
BUSY_GPU = {"used_bytes": 71 * 2**30, "utilisation": 0.974, "watts": 641.7}
BUDGET = {"ttft_requests": 12.4, "itl_requests": -3.2}
POWER = {"watts": 641.7, "wh_per_1000_tokens": 0.413}
UNSTREAMED = {**FIGURES, "ttft_mean_ms": None, "itl_mean_ms": None}


def status(*workers: dict[str, Any], width: int = 0, without: tuple[str, ...] = (), **more: Any) -> str:
    shown = {key: value for key, value in document(*workers, **more).items() if key not in without}
    return click.unstyle(render_page(view_of(shown, 100.0), width))


def memory(gpu: int, total_gb: int, foreign_gb: int, **models_gb: int) -> dict[str, Any]:
    by_model = {name: size * GIB for name, size in models_gb.items()}
    return {
        "index": gpu,
        "total_bytes": total_gb * GIB,
        "foreign_bytes": foreign_gb * GIB,
        "by_model": by_model,
    }


def turns(key: str, waiting: int, running: int, work: float) -> dict[str, Any]:
    return {"key": key, "waiting": waiting, "running": running, "work": work}


def planned(policy: str, **more: Any) -> dict[str, Any]:
    return {"policy": policy, "targets": None, "load": None, **more}


def doctor_page(*needs: Need, devices: tuple[Device, ...], unknown: tuple[str, ...] = ()) -> str:
    found = doctor.model_findings(ModelNeeds(needs, devices, NO_CONSTRAINTS, unknown), "m.yaml")
    return click.unstyle(doctor.page(list(found), 0))


STATUS: Mapping[str, Callable[[], str]] = {
    "status-of-people": partial(
        status,
        worker_document(),
        keys=key_rows(
            [
                {
                    "turns": {"": [turns("nightly", 33, 7, 8700.0), turns("alice", 0, 1, 1300.0)]},
                    "limits": {"nightly": [{"kind": "requests/min", "used": 99, "limit": 2000}]},
                }
            ]
        ),
    ),
    "status-of-one-look": partial(
        status,
        supervisor_pid=4,
        version="0.2.0",
        targets=TARGETS,
        gpus=[gpu_document(index) for index in range(3)],
    ),
    "status-under-targets": partial(
        status,
        worker_document(tokens_per_s=466.4),
        worker_document("dynamo_VllmWorker_1", is_alive=False, tokens_per_s=None),
        worker_document("dynamo_VllmWorker_2", state="draining", reason="1 of 2 VllmWorker wanted"),
        policy="sla",
        dispatch="by deadline, 500 ms (Planner.ttft)",
        load=FIGURES,
        targets=TARGETS,
        error_budget=BUDGET,
        power=POWER,
        last_decision="16:37:24  no change",
        gpus=[
            gpu_document(0, ("dynamo_VllmWorker",), **BUSY_GPU),
            gpu_document(1, others=["python (4711)"]),
            gpu_document(2),
            gpu_document(3),
        ],
        learnt=["decode workers: learnt from 41,000 steps"],
    ),
    "status-on-80-columns": partial(
        status,
        *(worker_document(f"dynamo_PrefillWorker_{index}", tokens_per_s=1.0) for index in range(2)),
        width=80,
        gpus=[
            gpu_document(0, ("dynamo_PrefillWorker_0",)),
            gpu_document(1, ("b",), name="L4", memory_bytes=0),
        ],
        load=FIGURES,
        last_decision="16:00:00  no change: " + "word " * 30,
    ),
    "status-without-serve": partial(
        status,
        serve_pid=None,
        models=[],
        without=("policy", "desired", "metrics_url", "gpus", "free_gpus"),
    ),
    "status-of-an-observer-without-streams": partial(status, observes_only=True, load=UNSTREAMED),
    "status-of-an-idle-service-without-planner": partial(
        status, policy=None, load={**UNSTREAMED, "requests_per_s": 0.0, "tokens_per_s": 0.0}
    ),
    "status-of-troubles": partial(
        status,
        worker_document(state="failed", reason="exit code 78"),
        worker_document("lost", state="starting", reason="its registration is gone"),
        worker_document("alone", is_managed=False),
        worker_document("waits", state="starting", waits="0 of 8 are free"),
        gpus=[gpu_document(0)],
        free_gpus=[0],
        holds={"decode": {"at_least": 1, "at_most": 1}},
        reservations={"1": Hold(by="alice").to_json()},
        load=None,
        troubles=["the planner has ended."],
        waits={"VllmWorker": "0 of 8 are free"},
        ignored_keys={"v1/x": "no number"},
        not_callable={"v1/y": "tcp"},
    ),
    "status-of-models": partial(
        status,
        worker_document(),
        worker_document("dynamo_bee", component="bee", state="failed", reason="broken"),
        policy=None,
        planned_models={"ant": {"policy": "load"}, "bee": {"policy": "sla"}},  # of which nothing was polled
        on_request={
            "ant": model_document(waiting=3, oldest_unix_s=90.0, in_flight=4, load=FIGURES, power=POWER),
            "bee": model_document(component="bee", state="failed", why="its file is broken", load=None),
        },
        model_memory=[memory(1, 24, 5, ant=12), memory(-1, 7, 0)],
    ),
    "status-of-planned-models": partial(
        status,
        policy=None,
        planned_models={
            "ant": planned("load", last_decision="16:00:00  no change: idle"),
            "bee": planned("sla", targets=TARGETS, load=FIGURES, error_budget=dict.fromkeys(BUDGET, 3.0)),
            "cow": planned("load", load=FIGURES),
        },
        on_request={
            name: model_document(state=state)
            for name, state in {"ant": "ready", "bee": "loading", "cow": "unloaded"}.items()
        },
    ),
}

REPORTS = {
    "ant": ModelReport(
        "ant", "ready", 0.0, "load: asked", False, (0, 1), 1060.0, load_s=4.0, memory_bytes=5 * 10**9
    ),
    "bee": ModelReport("bee", "loading", 990.0, load_s=41.0, is_pinned=True),
    "cow": ModelReport("cow", "unloaded", refusal=Refusal(409, "no room beside bee: pinned", 1000.0)),
}
WORKERS = {
    "ant": ModelReport("ant", "ready", workers={"ready": 1, "starting": 1, "draining": 1}, max_workers=3),
    "bee": ModelReport("bee", "unloaded"),
    "cow": ModelReport(
        "cow", "ready", workers={"ready": 1}, prefill=PoolReport(workers={"ready": 2}, max_workers=3)
    ),
}


def models(reports: Mapping[str, ModelReport], *more: Any) -> str:
    return models_table(model_rows(reports, *more), 1000.0, 100)


def gpus() -> str:
    held = (GpuHolder("dynamo_VllmWorker"), GpuHolder("alice: python (pid 7)", 0.0, "it ends"))
    activity = GpuActivity(0.9, 642.4, 61.0, 700.0)
    busy = BoxGpu(Gpu(0, "GPU-a", "H100", 80 * 2**30), GpuUse(71 * 2**30), activity, held)
    return text_table(gpu_rows([busy, BoxGpu(Gpu(1, "GPU-b"), None, GpuActivity(), ())]))


PAGES: Mapping[str, Callable[[], str]] = {
    **STATUS,
    "models": partial(
        models, REPORTS, {"cow": ModelDemand(3, 970.0, 0, 0.0)}, {"cow": SavedKv(2, 3210, 74_000_000)}
    ),
    "models-of-several-workers": partial(models, WORKERS, {}),
    "gpus": gpus,
    "doctor": lambda: click.unstyle(
        doctor.page(
            (
                Finding(Level.OK, "port", "8000 is free"),
                Finding(Level.WARNING, "shared memory", "small", "Make it larger."),
                Finding(Level.FAULT, "etcd", "there is none", "Install one."),
            ),
            0,
        )
    ),
    "doctor-where-all-models-fit": partial(
        doctor_page,
        Need("ant", 10 * GIB),
        Need("bee", 8 * GIB),
        devices=(Device(0, 24 * GIB),),
        unknown=("ant",),
    ),
    "doctor-where-not-all-models-fit": partial(
        doctor_page,
        *(Need("ant", 20 * GIB), Need("bee", 10 * GIB), Need("cow", 6 * GIB), Need("doe", 30 * GIB)),
        devices=(Device(0, 24 * GIB),),
    ),
    "doctor-where-others-hold-the-memory": partial(
        doctor_page, Need("ant", 10 * GIB), devices=(Device(0, 24 * GIB, foreign_bytes=20 * GIB),)
    ),
    "doctor-where-gpus-are-too-few": partial(
        doctor_page, Need("wide", GIB, devices=3), devices=(Device(0, 24 * GIB), Device(1, 24 * GIB))
    ),
}
"""By the name of the file."""


def kept(name: str) -> str:
    return (DIRECTORY / f"{name}.txt").read_text(encoding="utf-8")


def page(name: str) -> str:
    """The page as its file has it: no line ends with spaces."""
    return "".join(f"{line.rstrip()}\n" for line in PAGES[name]().splitlines())


def main() -> None:
    """Write every page anew."""
    DIRECTORY.mkdir(exist_ok=True)
    for file in DIRECTORY.glob("*.txt"):
        file.unlink()
    for name in PAGES:
        (DIRECTORY / f"{name}.txt").write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
