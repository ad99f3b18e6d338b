"""A graph's file means the same deployment to ``dynaplan simulate`` as to ``dynaplan serve``."""

from pathlib import Path

import pytest
from click.testing import CliRunner

import graphs
from dynaplan.cli.simulate import command
from dynaplan.config.settings.frontend import DisaggregationSettings
from dynaplan.lab.simulate.options import SimulatedGraph, read_graph
from dynaplan.simulation.router import SimulatedRouting
from dynaplan.util.errors import ConfigError

STOCK = Path(graphs.__file__).parent


@pytest.fixture
def graph(tmp_path):
    def read(text: str, *overrides: str) -> SimulatedGraph:
        file = tmp_path / "graph.yaml"
        file.write_text(text)
        return read_graph(file, overrides)

    return read


def test_what_a_file_leaves_out_is_as_serve_has_it(graph):
    routing = graph("VllmWorker: {remote-prefill: true}").routing()

    assert routing == {
        "routing": SimulatedRouting("round-robin"),
        "disaggregation": DisaggregationSettings(is_on=True),
        "prefill_wait_s": 30.0,
        "max_waiting_requests": 1024,
    }


def test_without_a_file_nobody_gives_a_remote_prefill_up_unless_an_option_says_so():
    assert read_graph(None, []).routing()["prefill_wait_s"] is None
    assert read_graph(None, ["--Frontend.prefill-wait=2"]).routing()["prefill_wait_s"] == 2.0


def test_the_sections_that_the_frontends_read_are_read_in_their_order(graph):
    routing = graph(
        "Common: {router: random}\n"
        "Router: {router: kv, kv_overlap_score_weight: 2}\n"
        "Processor: {router: least-loaded, common-configs: [router]}\n"
        "Frontend: {max-waiting-requests: 50, ServiceArgs: {workers: 2}}\n"
        "VllmWorker: {remote-prefill: true, conditional-disagg: true, max-local-prefill-length: 700,"
        " max_prefill_queue_size: 5}\n"
    ).routing()

    assert routing["routing"] == SimulatedRouting("kv", 2.0)
    assert routing["disaggregation"] == DisaggregationSettings(True, True, 700, max_prefill_queue_size=5)
    assert routing["max_waiting_requests"] == 50, "of both frontends together"


def test_without_a_file_every_prompt_is_computed_remotely_unless_an_option_says_otherwise():
    nothing = read_graph(None, []).routing()["disaggregation"]
    bounded = read_graph(None, ["--VllmWorker.max-prefill-queue-size=3"]).routing()["disaggregation"]

    assert (nothing.is_on, nothing.is_conditional, nothing.max_prefill_queue_size > 10_000) == (
        True,
        False,
        True,
    )
    assert bounded.max_prefill_queue_size == 3


def test_each_role_has_the_engine_of_its_section(graph):
    text = "VllmWorker: {max-num-seqs: 64}\nPrefillWorker: {max-num-batched-tokens: 4096}\n"

    decode, prefill = graph(text, "--PrefillWorker.max-concurrent-prefills=2").engines()

    assert decode == {"max-num-seqs": 64}
    assert prefill == {"max-num-batched-tokens": 4096, "max-concurrent-prefills": 2}


def test_without_a_file_prefill_workers_are_like_decode_workers_but_for_what_is_said_of_them():
    decode, prefill = read_graph(
        None, ["--VllmWorker.block-size=32", "--PrefillWorker.max-num-batched-tokens=4096"]
    ).engines()

    assert decode == {"block-size": 32}
    assert prefill == {"block-size": 32, "max-num-batched-tokens": 4096}


def test_a_worker_with_several_gpus_divides_the_layers_between_them(graph):
    decode, _ = graph("VllmWorker: {ServiceArgs: {workers: 3, resources: {gpu: '2'}}}").engines()

    assert decode == {"tensor-parallel-size": 2}


def test_the_workers_to_begin_with_are_those_that_serve_starts(graph):
    read = graph("VllmWorker: {ServiceArgs: {workers: 3}}\nPrefillWorker: {}")

    assert (read.workers("VllmWorker"), read.workers("PrefillWorker")) == (3, 1)


@pytest.mark.parametrize("text", ["{workers: none}", "{workers: 0}", "{resources: {gpu: -1}}"])
def test_a_wrong_number_in_the_service_args_is_refused_by_name(graph, text):
    with pytest.raises(ConfigError, match=r"VllmWorker.ServiceArgs.(workers|resources.gpu)"):
        read = graph(f"VllmWorker: {{ServiceArgs: {text}}}")
        read.engines(), read.workers("VllmWorker")


@pytest.mark.parametrize(("name", "static"), [("disagg", "1,1"), ("disagg_router", "1,1"), ("agg", "1")])
def test_the_stock_graphs_are_simulated_with_or_without_prefill_workers_as_they_say(name, static):
    arguments = ["--trace", "constant:rate=2,duration=5,isl=100,osl=5", "-f", str(STOCK / f"{name}.yaml")]

    result = CliRunner().invoke(
        command, [*arguments, "--policy", f"static:{static}"], catch_exceptions=False, standalone_mode=False
    )

    assert f"static:{static}  100.0%" in result.output


def test_how_long_the_engine_takes_to_start_is_the_start_up_time_unless_the_command_line_says(
    graph, tmp_path
):
    def page(*more: str) -> str:
        target = tmp_path / "page.html"
        arguments = ["--trace", "constant:rate=2,duration=5", "--html", str(target), *more]
        CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)
        return target.read_text()

    assert "<dt>Start-up</dt><dd>7 s</dd>" in page("--VllmWorker.startup-time=7")
    assert "<dt>Start-up</dt><dd>9 s</dd>" in page("--VllmWorker.startup-time=7", "--startup-time", "9")
