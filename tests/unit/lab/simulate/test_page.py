"""The page of a simulation: its numbers are those of the results, and it needs nothing but itself."""

import json
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest

from dynaplan.contract.counts import PoolSizes
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.page import page, panels_of
from dynaplan.lab.simulate.policy_runs import run_simulations
from dynaplan.lab.simulate.table import columns_of, rows
from dynaplan.simulation.outcome import Outcome, Slo
from dynaplan.simulation.run import Result, ScaleEvent

OPTIONS = SimulateOptions(
    trace="step:low=2,high=14,at=20,duration=60,isl=2000,osl=60",
    policies=("load", "static:1,2", "both"),
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
    return page(OPTIONS, results())


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
        for key, (_, shown) in columns_of(rows(results())).items():
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
            assert embedded_one["text"].endswith(event.why)
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
    event = ScaleEvent(1.0, PoolSizes(1, 1), PoolSizes(1, 2), evil)
    named = [replace(results()[0], policy=evil, events=(event,))]
    text = page(replace(OPTIONS, trace=evil, planner={"a": evil}), named)

    assert len(Read(text).all("script")) == 2
    assert "img" not in [tag for tag, _ in Read(text).elements]
    assert embedded(text)["policies"] == [evil]


def test_the_best_of_a_column_is_marked_and_nothing_where_all_are_alike():
    compared = [
        Result("static", Outcome(Slo(), requests=100_000, both_met=met), hours, 0.0, 0.0, 0, 0)
        for met, hours in ((50_000, 0.3), (90_000, 0.2), (90_001, 0.1))
    ]
    body = page(OPTIONS, compared).partition("<tbody>")[2].partition("</tbody>")[0]

    assert re.findall(r'<td class="best">([^<]*)</td>', body) == ["90.0%", "90.0%", "0.100"]


def test_the_same_results_make_the_same_page():
    assert page(OPTIONS, tuple(run_simulations(OPTIONS))) == made()


def test_an_aggregated_deployment_has_no_charts_of_prefill():
    options = replace(OPTIONS, is_disaggregated=False, policies=("static:2",))
    keys = [each.key for each in panels_of(list(run_simulations(options)), Slo(), 4, is_disaggregated=False)]

    assert "decode" in keys
    assert not {"prefill", "queue"} & set(keys)


def test_the_page_has_the_notes_of_its_results():
    text = page(OPTIONS, [replace(results()[0], note="It keeps the <promise>.")], ["Queued <prompts>."])

    assert {"It keeps the <promise>.", "Queued <prompts>."} <= set(Read(text).all("p"))
    assert embedded(text)["rows"][0]["note"] == "It keeps the <promise>."


def test_a_trace_without_requests_has_a_page_too():
    empty = Result("load", Outcome(Slo()), 0.0, 0.0, 0.0, 0, 0)

    assert embedded(page(OPTIONS, [empty]))["decisions"] == [[]]


def test_it_says_which_prompts_are_computed_locally_and_that_prefill_has_another_engine() -> None:
    remote = replace(
        OPTIONS.disaggregation,
        max_prefill_queue_size=3,
        is_conditional=True,
        max_local_prefill_length_tokens=700,
    )
    said = page(replace(OPTIONS, disaggregation=remote, prefill_engine={"speedup-ratio": 2}), results())
    assert "with 3 prompts in the prefill queue or of prompts up to 700 tokens" in said
    assert "speedup-ratio=2" in said
