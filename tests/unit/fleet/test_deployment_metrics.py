"""The fleet's own samples of ``/metrics/all``, and metrics of many processes as one text."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.fleet import deployment_metrics
from dynaplan.fleet.deployment_metrics import (
    DeploymentMetrics,
    FleetSample,
    desired_samples,
    fleet_samples,
    merge,
    tokens_by_source,
)
from dynaplan.fleet.rules.statefile import with_fleet
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from tests.unit.fleet.rules.test_statefile import FIRST, new_document


def test_each_worker_has_its_state_its_restarts_and_its_gpus() -> None:
    samples = list(fleet_samples(with_fleet(new_document(), [FIRST])))
    assert [(name, value) for name, _, _, value in samples] == [
        ("dynaplan_worker_state", 1.0),
        ("dynaplan_worker_recent_restarts", 0.0),
        ("dynaplan_gpu_held", 1.0),
    ]
    assert samples[0][2] | {"state": "ready", "worker": FIRST.name} == samples[0][2]
    assert samples[2][2] == {"gpu": "0", "worker": FIRST.name}


def test_counts_that_are_not_set_are_left_out() -> None:
    assert [(labels, value) for _, _, labels, value in desired_samples(DesiredCounts(-1, 3))] == [
        ({"role": "decode"}, 3.0)
    ]


def test_the_tokens_of_each_frontend_are_counted_on_their_own() -> None:
    one = 'x_output_tokens_total{model="bee"} 5\nx_output_tokens_total{model="ant:8b"} 1\n'
    other = 'x_output_tokens_total{model="bee"} 2\nx_requests_total{model="bee"} 9\n'
    assert tokens_by_source([("one", one), ("other", other)]) == {
        ("one", "bee"): 5.0,
        ("one", "ant:8b"): 1.0,
        ("other", "bee"): 2.0,
    }


ONE = """# HELP a_total About a
# TYPE a_total counter
a_total{x="1"} 1
a_total 2
# TYPE b histogram
b_bucket{le="+Inf"} 3
"""
TWO = "# HELP a_total Otherwise\n# TYPE a_total counter\na_total{} 5 1700000000\nplain 7\n\n# a comment\n"


def test_each_family_has_one_head_and_all_samples_below_it() -> None:
    text = merge([("w1", ONE), ("w2", TWO)])
    assert text.splitlines() == [
        "# HELP a_total About a",
        "# TYPE a_total counter",
        'a_total{worker="w1",x="1"} 1',
        'a_total{worker="w1"} 2',
        'a_total{worker="w2"} 5 1700000000',
        "# TYPE b histogram",
        'b_bucket{worker="w1",le="+Inf"} 3',
        'plain{worker="w2"} 7',
    ]
    assert [family.name for family in text_string_to_metric_families(text)] == ["a", "b", "plain"]


def test_a_sample_that_says_its_worker_keeps_it_and_a_nameless_text_gets_none() -> None:
    assert merge([("w1", 'up{worker="other"} 1\n'), ("", "up 2\n")]) == 'up{worker="other"} 1\nup 2\n'


def test_a_name_is_escaped_and_an_empty_text_adds_nothing() -> None:
    assert merge([('a"b', "up 1\n"), ("silent", "")]) == 'up{worker="a\\"b"} 1\n'


async def test_the_others_metrics_are_told_while_the_driver_of_the_gpus_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deployment_metrics, "METRICS_CACHE_S", 0.0)
    answers, reads = threading.Event(), 0

    def read() -> list[FleetSample]:
        nonlocal reads
        reads += 1
        answers.wait()
        return [("dynaplan_gpu_watts", "Power", {"gpu": "0"}, 7.0)]

    runtime = SimpleNamespace(namespace="ns", store=MemoryStore(SystemClock()), client_tls=None)
    metrics = DeploymentMetrics(cast(Any, runtime))
    metrics._read_gpus = read
    try:
        monkeypatch.setattr(deployment_metrics, "METRICS_TIMEOUT_S", 0.05)
        async with asyncio.timeout(20):
            assert [await metrics.read(lambda: b"own 1\n") for _ in range(2)] == [b"own 1\n"] * 2
        assert reads == 1
        monkeypatch.setattr(deployment_metrics, "METRICS_TIMEOUT_S", 60.0)
        answers.set()
        assert b"dynaplan_gpu_watts" in await metrics.read(lambda: b"own 1\n")
    finally:
        answers.set()
        await metrics.close()
