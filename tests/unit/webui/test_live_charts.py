"""The live charts: panels of what is known, decisions at their moments, and the numbers for the script."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from dynaplan.webui.live_charts import ChartsAsked, ChartsLimits, TimedChange, live_svg
from dynaplan.webui.samples import DeploymentSample

NOW_S = 1_800_000_000.0
LIMITS = ChartsLimits({"ttft_ms": 500.0, "itl_ms": 50.0, "ttft_percentile": 90.0}, 8, has_prefill=True)
SAMPLE = DeploymentSample(
    NOW_S - 100, 60.0, requests_per_s=5.0, ttft_ms=80.0, ttft_high_ms=200.0, decode=2.0, decode_wanted=3.0
)
EVIL = '</title><script>alert(1)</script> "quoted" & more\nlines'


def drawn(*changes: TimedChange, limits: ChartsLimits = LIMITS, width: int = 1000) -> str:
    return live_svg(ChartsAsked(900, width), [SAMPLE], changes, limits, NOW_S, 3600.0)


def numbers_in(svg: str) -> dict:
    """What the script reads."""
    root = ElementTree.fromstring(svg)
    return json.loads(root.find("{*}metadata").text)


def test_it_is_one_document_on_one_line_whatever_it_holds() -> None:
    svg = drawn(TimedChange(NOW_S - 50, EVIL))
    assert "\n" not in svg
    root = ElementTree.fromstring(svg)
    assert {each.tag.rpartition("}")[2] for each in root.iter()} <= {
        *("svg", "metadata", "g", "text", "path", "title")
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
    without = drawn(limits=ChartsLimits({}, 0, has_prefill=False))
    assert 'class="limit"' not in without
    assert "target" not in without


def test_prefill_workers_are_drawn_where_there_are_any() -> None:
    (decode,) = (each for each in numbers_in(drawn())["panels"] if each["key"] == "decode")
    assert [each["name"] for each in decode["series"]] == ["decode", "wanted", "prefill", "wanted"]


@pytest.mark.parametrize(
    ("span", "width", "asked"),
    [("900", "1000", (900, 1000)), ("4000", "390", (3600, 380)), ("-1", "99999", (900, 1000))],
)
def test_the_nearest_of_a_few_sizes_is_drawn(span: str, width: str, asked: tuple[int, int]) -> None:
    assert ChartsAsked.of(span, width) == ChartsAsked(*asked)


def test_a_size_that_is_no_number_is_none() -> None:
    with pytest.raises(ValueError):
        ChartsAsked.of("1h", "1000")
