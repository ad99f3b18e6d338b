"""The page of a simulation: its numbers are those of the results, and it needs nothing but itself."""

import json
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest

from dynaplan.cli.simulate import COLUMNS as ALL_COLUMNS
from dynaplan.cli.simulate import columns_of
from dynaplan.domain.planning.targets import Targets
from dynaplan.simulator.outcome import Outcome, Slo
from dynaplan.simulator.report.charts import panels_of
from dynaplan.simulator.report.drawing import (
    HEAD,
    LEFT,
    PLOT,
    RIGHT,
    WIDTH,
    Panel,
    Scale,
    Series,
    TimeAxis,
    draw,
)
from dynaplan.simulator.report.page import page, picture
from dynaplan.simulator.run import Result
from dynaplan.simulator.shell.simulation import SimulateOptions, rows, run_simulations
from dynaplan.simulator.timeline import ScaleEvent

OPTIONS = SimulateOptions(
    trace="step:low=2,high=14,at=20,duration=60,isl=2000,osl=60",
    policies=("load", "static:1,2", "hpa"),
    gpus=6,
    startup_time_s=10.0,
    slo=Slo(300.0, 20.0),
    planner={"adjustment-interval": 5, "metric-pulling-interval": 1},
)


@cache
def results() -> tuple[Result, ...]:
    return tuple(run_simulations(OPTIONS))


@cache
def made() -> str:
    return page(OPTIONS, results(), rows(results()), COLUMNS)


class Read(HTMLParser):
    """The elements of a page: tags, attributes, and the text within scripts, cells and headings."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.append((tag, ""))

    def handle_data(self, data: str) -> None:
        if self.texts:
            tag, before = self.texts[-1]
            self.texts[-1] = tag, before + data

    def handle_endtag(self, tag: str) -> None:
        self.texts.append(("", ""))

    def all(self, tag: str) -> list[str]:
        return [text for each, text in self.texts if each == tag]


COLUMNS = columns_of([{key: None for key in ALL_COLUMNS if not key.endswith("_of_oracle")}])


def embedded(text: str) -> dict:
    (script,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(script)


def lines(key: str, policy: int) -> list[dict]:
    (panel,) = (each for each in embedded(made())["panels"] if each["key"] == key)
    return [each for each in panel["series"] if each["policy"] == policy]


def close(values):
    return [None if value is None else pytest.approx(value, rel=1e-5) for value in values]


def test_the_embedded_rows_are_those_of_the_table_in_the_terminal():
    assert embedded(made())["rows"] == rows(results())


def test_the_table_shows_what_the_terminal_shows():
    cells = Read(made()).all("td")

    for row in rows(results()):
        for key, (_, shown) in COLUMNS.items():
            assert key == "policy" or shown.format(row[key]) in cells


@pytest.mark.parametrize("policy", range(3))
def test_the_embedded_latencies_are_the_percentiles_of_each_window(policy):
    windows = list(results()[policy].outcome.windows)

    for key in ("ttft_ms", "itl_ms"):
        (line,) = lines(key, policy)
        spreads = [getattr(each, key) for each in windows]
        assert line["values"] == close([each.percentile(95) if each.count else None for each in spreads])
        assert line["at_s"] == [float(index) for index in range(len(windows))]


def test_the_embedded_load_is_that_of_the_trace():
    (requests,) = lines("requests", -1)
    prompts, answers = lines("tokens", -1)
    count = results()[0].outcome.requests

    assert sum(requests["values"]) == pytest.approx(count)
    assert sum(prompts["values"]) == pytest.approx(2000 * count)
    assert sum(answers["values"]) == pytest.approx(60 * count)


@pytest.mark.parametrize("policy", range(3))
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_embedded_workers_and_gpus_are_those_of_the_fleet(policy, role):
    fleet = results()[policy].fleet
    serving, wanted = lines(role, policy)
    (gpus,) = lines("gpus", policy)

    assert serving["values"] == [getattr(each.serving, role) for each in fleet]
    assert wanted["values"] == [getattr(each.wanted, role) for each in fleet]
    assert gpus["values"] == [each.gpus for each in fleet]
    assert gpus["at_s"] == [pytest.approx(each.at_s, abs=1e-3) for each in fleet]


def test_the_embedded_queue_is_the_mean_of_what_the_looks_saw_in_each_window():
    (line,) = lines("service", 2)
    moments = results()[2].moments

    assert [each.at_s for each in moments] == line["at_s"]
    assert line["values"] == close([each.in_service for each in moments])


def test_every_decision_is_there_with_its_reason():
    decisions = embedded(made())["decisions"]
    told = Read(made()).all("td")

    assert [len(each) for each in decisions] == [len(each.events) for each in results()]
    assert decisions[0]
    assert decisions[1] == []
    assert decisions[2]
    for result, those in zip(results(), decisions, strict=True):
        for event, embedded_one in zip(result.events, those, strict=True):
            assert event.why
            assert embedded_one["told"].endswith(event.why)
            assert event.why in told


def test_the_page_says_what_was_asked_for():
    text = " ".join(Read(made()).all("dd"))

    assert OPTIONS.trace in text
    assert "h200_sxm-Llama-3.1-8B-Instruct-FP8" in text
    assert "6, prefill and decode workers" in text
    assert "10 s" in text
    assert "TTFT 300 ms, ITL 20 ms" in text
    assert "adjustment-interval=5" in text


def test_the_page_needs_no_other_file_and_no_network():
    elements = Read(made()).elements

    assert "http" not in re.sub(r'http-equiv=|"http://www.w3.org/2000/svg"', "", made())
    assert not {"src", "href"} & {name for _, attributes in elements for name in attributes}
    assert not re.search(r"@import|url\(", made())


def test_no_text_of_the_user_can_become_a_tag():
    evil = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
    event = ScaleEvent(1.0, Targets(1, 1), Targets(1, 2), evil)
    named = [replace(results()[0], policy=evil, events=(event,))]
    text = page(replace(OPTIONS, trace=evil, planner={"a": evil}), named, rows(named), COLUMNS)

    assert len(Read(text).all("script")) == 2
    assert "img" not in [tag for tag, _ in Read(text).elements]
    assert embedded(text)["policies"] == [evil]


def test_the_best_of_a_column_is_marked_and_nothing_where_all_are_alike():
    table = [
        {**row, "slo": slo, "gpu_hours": hours, "lost": 0}
        for row, slo, hours in zip(rows(results()), (0.5, 0.9, 0.90001), (0.3, 0.2, 0.1), strict=True)
    ]
    shown = {key: COLUMNS[key] for key in ("policy", "slo", "gpu_hours", "lost")}
    body = page(OPTIONS, results(), table, shown).partition("<tbody>")[2].partition("</tbody>")[0]

    assert re.findall(r'<td class="best">([^<]*)</td>', body) == ["90.0%", "90.0%", "0.100"]


def test_the_same_results_make_the_same_page():
    assert page(OPTIONS, tuple(run_simulations(OPTIONS)), rows(results()), COLUMNS) == made()


def test_an_aggregated_deployment_has_no_charts_of_prefill():
    options = replace(OPTIONS, is_disaggregated=False, policies=("static:2",))
    keys = [each.key for each in panels_of(list(run_simulations(options)), Slo(), 4, is_disaggregated=False)]

    assert "decode" in keys
    assert not {"prefill", "queue"} & set(keys)


def test_a_trace_without_requests_has_a_page_too():
    empty = Result("load", Outcome(Slo()), 0.0, 0.0, 0.0, 0, 0)

    assert embedded(page(OPTIONS, [empty], rows([empty]), COLUMNS))["decisions"] == [[]]


def test_a_picture_is_one_svg_that_tells_its_first_decisions():
    text = picture(OPTIONS, results()[:1], "Load & more", ["decode", "ttft_ms"])

    assert text.startswith("<svg")
    assert "Load &amp; more" in text
    assert results()[0].events[0].why.split()[0] in text
    assert re.findall(r'data-key="(\w+)"', text) == ["decode", "ttft_ms"]


# -- drawing -------------------------------------------------------------------------------------------


def drawn(panel: Panel, end_s: float = 100.0) -> list[tuple[float, float | None]]:
    """What the path of the only line says: each moment, and the value that holds from then on."""
    svg, _ = draw([panel], [], TimeAxis(end_s))
    (path,) = re.findall(r'class="line[^>]*d="([^"]*)"', svg)
    steps, x, value = [], 0.0, None
    for command, first, second in re.findall(r"([MHV])([\d.-]+) ?([\d.-]+)?", path):
        x = float(first) if command in "MH" else x
        if command in "MV":
            y = float(second) if command == "M" else float(first)
            value = (HEAD + PLOT - y) / PLOT * Scale.of(panel).high
        steps.append(((x - LEFT) / (WIDTH - LEFT - RIGHT) * end_s, value))
    return steps


def near(steps):
    return [(pytest.approx(at_s, abs=0.1), pytest.approx(value, abs=0.1)) for at_s, value in steps]


def test_a_line_steps_at_each_moment_to_its_value_and_ends_with_the_axis():
    panel = Panel("k", "t", [Series("", [0, 10, 20, 50], [1, 4, 4, 2])])

    assert drawn(panel) == near([(0, 1), (10, 1), (10, 4), (50, 4), (50, 2), (100, 2)])


def test_a_line_has_a_gap_where_there_is_no_value():
    panel = Panel("k", "t", [Series("", [0, 10, 20, 50], [1, None, 4, None])])

    assert drawn(panel) == near([(0, 1), (10, 1), (20, 4), (50, 4)])


def test_what_comes_after_the_end_of_the_axis_is_not_drawn():
    panel = Panel("k", "t", [Series("", [0, 150], [1, 4])])

    assert drawn(panel) == near([(0, 1), (100, 1)])


@pytest.mark.parametrize(
    ("values", "limit", "is_log"),
    [([100.0], None, False), ([100.0], 500.0, False), ([5000.0], 500.0, True), ([0.0], None, False)],
)
def test_an_adaptive_axis_is_logarithmic_only_when_a_line_goes_far_beyond(values, limit, is_log):
    scale = Scale.of(Panel("k", "t", [Series("", [0], values)], limit, is_adaptive=True))

    assert scale.is_log is is_log
    assert scale.height(max([*values, limit or 0])) <= 1
    assert 1 <= len(scale.ticks()) <= 5


def test_an_axis_of_counts_has_whole_numbers():
    for most in range(20):
        ticks = Scale.of(Panel("k", "t", [Series("", [0], [most])], is_counted=True)).ticks()
        assert all(tick == int(tick) for tick in ticks)
        assert ticks[-1] >= most


@pytest.mark.parametrize(
    ("end_s", "told"), [(500, "312 s"), (3600, "5.21 min"), (86400, "0.09 h")], ids=["s", "min", "h"]
)
def test_moments_are_told_in_the_unit_that_suits_the_whole(end_s, told):
    assert TimeAxis(end_s).told(312.4) == told
    assert 4 <= len(TimeAxis(end_s).ticks()) <= 11
