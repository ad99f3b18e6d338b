"""The live charts: panels of what is known, decisions at their moments, and the numbers for the script."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from dynaplan.webui.charts import (
    ChartLimits,
    ChartsRequest,
    DeploymentSample,
    TimedChange,
    live_svg,
    record_time_s,
    resample,
    sample_of_status,
    samples_of_log,
)
from tests.unit.cli.status_documents import FIGURES, document, gpu_document, worker_document

NOW_S = 1_800_000_000.0
LIMITS = ChartLimits({"ttft_ms": 500.0, "itl_ms": 50.0, "ttft_percentile": 90.0}, 8, has_prefill=True)
SAMPLE = DeploymentSample(
    NOW_S - 100, 60.0, requests_per_s=5.0, ttft_ms=80.0, ttft_high_ms=200.0, decode=2.0, decode_wanted=3.0
)
EVIL = '</title><script>alert(1)</script> "quoted" & more\nlines'


def drawn(*changes: TimedChange, limits: ChartLimits = LIMITS, width: int = 1000) -> str:
    return live_svg(ChartsRequest(900, width), [SAMPLE], changes, limits, NOW_S, 3600.0)


def numbers_in(svg: str) -> dict:
    """What the script reads."""
    root = ElementTree.fromstring(svg)
    return json.loads(root.find("{*}metadata").text)


def test_it_is_one_document_on_one_line_whatever_it_holds() -> None:
    svg = drawn(TimedChange(NOW_S - 50, EVIL))
    assert "\n" not in svg
    root = ElementTree.fromstring(svg)
    assert {each.tag.rpartition("}")[2] for each in root.iter()} <= {
        *("svg", "metadata", "g", "text", "tspan", "path", "title")
    }


def test_panels_of_which_nothing_is_known_are_left_out() -> None:
    assert [each["key"] for each in numbers_in(drawn())["panels"]] == ["requests", "ttft_ms", "decode"]


def test_a_decision_stands_at_its_moment_with_its_reason() -> None:
    svg = drawn(TimedChange(NOW_S - 90, "decode 2 -> 3: more"), TimedChange(NOW_S - 5000, "long ago"))
    assert numbers_in(svg)["decisions"] == [[{"at_s": 810.0, "text": "decode 2 -> 3: more"}]]
    assert re.findall(r"<title>([^<]*)</title>", svg) == ["08:58:30 decode 2 -&gt; 3: more"]


def test_times_are_those_of_the_machines_clock() -> None:
    axis = numbers_in(drawn())["axis"]
    assert (axis["began_s"], axis["offset_s"]) == (NOW_S - 900, 3600.0)
    assert ">08:50<" in drawn()


def test_targets_are_drawn_where_there_are_any() -> None:
    assert 'class="limit"' in drawn()
    assert "p90" in drawn()
    without = drawn(limits=ChartLimits({}, 0, has_prefill=False))
    assert 'class="limit"' not in without
    assert "target" not in without


def test_a_legend_names_the_lines_and_the_limit() -> None:
    root = ElementTree.fromstring(drawn())
    (title,) = root.findall("{*}g[@data-key='ttft_ms']/{*}text[@class='title']")
    assert [each.text.strip() for each in title.findall("{*}tspan[@class='name']")] == [
        "p90",
        "mean",
        "target",
    ]


def test_the_kv_usage_counts_waiting_requests_and_shows_the_planners_threshold() -> None:
    look = document(worker_document(kv_pressure=1.06, running=3, waiting=4), load=None)
    sample = sample_of_status(look, NOW_S - 5, 10.0)
    assert sample.kv_usage == pytest.approx(1.06)
    limits = ChartLimits({}, 0, has_prefill=False, kv_scale_up=0.9)
    svg = live_svg(ChartsRequest(900, 1000), [sample], [], limits, NOW_S, 0.0)
    assert "KV cache, % (+2 a waiting request)" in svg
    assert " add a worker</tspan>" in svg


def test_without_gpus_none_are_drawn() -> None:
    look = document(worker_document(gpus=[]), load=None, gpus=[])
    assert sample_of_status(look, 100.0, 10.0).gpus is None
    svg = live_svg(
        ChartsRequest(900, 380),
        [DeploymentSample(NOW_S - 5, 10.0, decode=1.0, gpus=1.0)],
        [],
        ChartLimits({}, 0, has_prefill=False),
        NOW_S,
        0.0,
    )
    assert [each["key"] for each in numbers_in(svg)["panels"]] == ["decode"]


def test_prefill_workers_are_drawn_where_there_are_any() -> None:
    (decode,) = (each for each in numbers_in(drawn())["panels"] if each["key"] == "decode")
    assert [each["name"] for each in decode["series"]] == [
        "decode",
        "decode wanted",
        "prefill",
        "prefill wanted",
    ]


@pytest.mark.parametrize(
    ("span", "width", "asked"),
    [("900", "1000", (900, 1000)), ("4000", "390", (3600, 380)), ("-1", "99999", (900, 1000))],
)
def test_the_nearest_of_a_few_sizes_is_drawn(span: str, width: str, asked: tuple[int, int]) -> None:
    assert ChartsRequest.of(span, width) == ChartsRequest(*asked)


def test_a_size_that_is_no_number_is_none() -> None:
    with pytest.raises(ValueError):
        ChartsRequest.of("1h", "1000")


def record(second: int = 0, **observation: Any) -> dict[str, Any]:
    fleet = {
        "decode": {"ready": 2, "starting": 1, "failed": 1, "gpus": 2},
        "prefill": {"ready": 1, "gpus": 1},
        "gpus_total": 8,
    }
    desired = {"num_decode_workers": 3, "num_prefill_workers": -1}
    seen = {"fleet": fleet, "desired": desired, "load": {"kv_usage": 0.5}, **observation}
    return {"wall_time": f"2026-11-22T10:00:{second:02}+00:00", "observation": seen}


TRAFFIC = {"interval_s": 5.0, "requests": 50.0, "osl_tokens": 20.0, "ttft_ms": 120.0, "itl_ms": None}


def test_a_record_tells_traffic_workers_and_the_gpus_that_they_hold() -> None:
    (sample,) = samples_of_log([record(traffic=TRAFFIC)])
    assert sample.requests_per_s == 10.0
    assert sample.tokens_per_s == 200.0
    assert (sample.ttft_ms, sample.itl_ms) == (120.0, None)
    assert (sample.decode, sample.decode_wanted) == (2.0, 3.0)
    assert (sample.prefill, sample.prefill_wanted) == (1.0, None)
    assert sample.gpus == 7.0
    assert sample.kv_usage == 0.5
    assert sample.lasted_s == 5.0


def test_a_record_speaks_for_the_time_since_the_one_before() -> None:
    samples = list(samples_of_log([record(0), record(30)]))
    assert [each.lasted_s for each in samples] == [600.0, 30.0]


def test_the_first_record_speaks_for_no_time_before_the_deployment() -> None:
    began_s = record_time_s(record(0))
    assert began_s is not None
    samples = list(samples_of_log([record(20), record(30)], began_s + 5))
    assert [each.lasted_s for each in samples] == [15.0, 10.0]


def test_records_that_cannot_be_read_leave_out_what_they_do_not_say() -> None:
    odd: list[dict[str, Any]] = [
        {},
        {"wall_time": 5},
        {"wall_time": "2026-11-22T10:00:00+00:00", "observation": {"fleet": 7, "load": {"kv_usage": "x"}}},
    ]
    (sample,) = samples_of_log(odd)
    assert (sample.decode, sample.gpus, sample.kv_usage) == (None, None, None)
    assert record_time_s({"wall_time": "noon"}) is None


def test_a_look_tells_load_workers_and_gpus() -> None:
    prefill = worker_document("p", role="prefill", state="starting", running=None, waiting=4, kv_usage=None)
    look = document(
        worker_document(),
        prefill,
        worker_document("f", role="frontend"),
        load=FIGURES,
        desired={"decode": 2, "prefill": 1},
        gpus=[
            gpu_document(0, ("w",), utilisation=0.5),
            gpu_document(1, ("p",)),
            gpu_document(2, utilisation=0.9),
        ],
    )
    sample = sample_of_status(look, 100.0, 10.0)
    assert (sample.at_s, sample.lasted_s) == (100.0, 10.0)
    assert (sample.requests_per_s, sample.ttft_high_ms, sample.itl_high_ms) == (7.25, 96.3, None)
    assert (sample.decode, sample.prefill, sample.prefill_wanted) == (1.0, 0.0, 1.0)
    assert (sample.gpus, sample.gpus_busy) == (2.0, 0.5)
    assert (sample.kv_usage, sample.running, sample.waiting) == (0.25, 1.0, 4.0)


def test_before_the_second_look_the_load_is_not_known() -> None:
    sample = sample_of_status(document(load=None), 100.0, 10.0)
    assert sample.requests_per_s is None
    assert sample.gpus_busy is None


def test_steps_have_the_value_of_the_last_sample_that_speaks_for_them() -> None:
    samples = [
        DeploymentSample(20.0, 20.0, decode=1.0, kv_usage=0.5),
        DeploymentSample(30.0, 10.0, decode=2.0),
        DeploymentSample(100.0, 5.0, decode=9.0),
        DeploymentSample(-50.0, 5.0, decode=9.0),
    ]
    lines = resample(samples, 0.0, 10.0, 5)
    assert lines["decode"] == [1.0, 1.0, 2.0, 2.0, None]
    assert lines["kv_usage"] == [0.5, 0.5, 0.5, None, None]
    assert lines["running"] == [None] * 5


def test_each_model_that_is_loaded_on_request_has_a_line_of_its_own() -> None:
    busy = {"requests_per_s": 2.0, "tokens_per_s": 30.0}
    models = {f"m{number}": {"load": busy} for number in range(10)}
    idle = {"idle": {"load": {"requests_per_s": 0.0, "tokens_per_s": 0.0}}, "unknown": {"load": None}}
    sample = sample_of_status(document(load=None, on_request={**models, **idle}), NOW_S - 5, 10.0)
    limits = ChartLimits({}, 0, has_prefill=False, is_by_model=True)
    svg = live_svg(ChartsRequest(900, 1000), [sample], [], limits, NOW_S, 0.0)
    panels = {each["key"]: each["series"] for each in numbers_in(svg)["panels"]}
    assert [each["name"] for each in panels["requests"]] == [f"m{number}" for number in range(8)]
    assert panels["tokens"][0]["values"][-2] == 30
    assert [each["name"] for each in panels["decode"]] == ["of all models"]


def test_a_legend_has_a_line_of_its_own_where_the_title_leaves_no_room() -> None:
    def titles(width: int) -> list[str]:
        root = ElementTree.fromstring(drawn(width=width))
        return [
            "".join(each.itertext())
            for each in root.findall("{*}g[@data-key='decode']/{*}text[@class='title']")
        ]

    assert len(titles(1000)) == 1
    above, below = titles(380)
    assert above == "Workers ready"
    assert "prefill wanted" in below
