"""The frontends' counts: read from their text, compared, and made into Traffic."""

from __future__ import annotations

import pytest

from dynaplan.contract.traffic import INPUT_TOKENS
from dynaplan.gateway.engine_answers import Usage
from dynaplan.gateway.metrics import FrontendMetrics
from dynaplan.planner.metrics.exposition import (
    DEFAULT_PREFIX,
    ISL,
    OSL,
    REQUESTS,
    TTFT,
    Counts,
    Exposition,
    dispersion,
    has_restarted,
    increase,
    traffic_of,
)
from dynaplan.planner.sizing.queueing.workload import points_of


def frontend(namespace: str = "ns") -> FrontendMetrics:
    return FrontendMetrics(namespace, lambda: 0.0)


def answer(metrics: FrontendMetrics, model: str = "m", isl: int = 300, osl: int = 50) -> None:
    record = metrics.record(model, "completions", is_stream=True)
    record.finish("", isl, Usage(isl, osl))


def read(metrics: FrontendMetrics, namespace: str = "ns") -> Counts:
    return Exposition(DEFAULT_PREFIX, namespace).read(metrics.render())


def test_what_a_frontend_counted_is_read_over_all_models() -> None:
    metrics = frontend()
    answer(metrics, "a", isl=100, osl=10)
    answer(metrics, 'b "quoted", le="7", dynamo_namespace="other"', isl=300, osl=50)
    seen = traffic_of(30.0, read(metrics))
    assert (seen.requests, seen.isl_tokens, seen.osl_tokens) == (2, 200, 30)


def test_requests_over_a_promised_time_are_read_with_it_and_are_not_known_of_other_frontends() -> None:
    now_s = iter(range(100))
    metrics = FrontendMetrics("ns", lambda: float(next(now_s)), promised_ms=(500.0, 1234567.5))
    record = metrics.record("m", "completions", is_stream=True)
    assert traffic_of(30.0, read(metrics)).over_ttft == ((500.0, 0.0),)
    record.observe(1)
    seen = traffic_of(30.0, read(metrics))
    assert (seen.over_ttft, seen.over_itl) == (((500.0, 1.0),), ((1234567.5, 0.0),))
    assert seen.first_tokens == 1.0
    assert traffic_of(30.0, read(frontend())).over_ttft == ()


def test_another_namespace_does_not_count_and_one_without_a_name_does() -> None:
    metrics = frontend("other")
    answer(metrics)
    assert traffic_of(30.0, read(metrics)).requests == 0
    text = (
        b'dynamo_frontend_requests_started_total{model="m"} 3\ndynamo_frontend_requests_started_total 4 17\n'
    )
    assert Exposition(DEFAULT_PREFIX, "ns").read(text) == {(REQUESTS, ""): 7}


def test_with_a_model_only_its_traffic_counts_and_what_was_refused_before_the_model_was_known() -> None:
    metrics = frontend()
    answer(metrics, "Mine", isl=100, osl=10)
    answer(metrics, "another", isl=300, osl=50)
    metrics.count_refusal("completions", "overload")
    text = metrics.render() + b"dynamo_frontend_requests_started_total 4\n"
    for name in ("Mine", "mine"):
        seen = traffic_of(30.0, Exposition(DEFAULT_PREFIX, "ns", name).read(text))
        assert (seen.requests, seen.isl_tokens, seen.osl_tokens) == (1 + 1 + 4, 100, 10)
    assert traffic_of(30.0, Exposition(DEFAULT_PREFIX, "ns").read(text)).requests == 7


def test_a_model_that_no_frontend_has_served_while_others_were_is_told() -> None:
    metrics, exposition = frontend(), Exposition(DEFAULT_PREFIX, "ns", "misspelt")
    exposition.read(metrics.render())
    assert exposition.served.unserved == "", "nobody has asked for anything yet"
    answer(metrics, "mine")
    exposition.read(metrics.render())
    assert exposition.served.unserved == (
        "served-model-name is 'misspelt', and the frontends have served 'mine' only"
    )
    answer(metrics, "Misspelt")
    exposition.read(metrics.render())
    assert exposition.served.unserved == ""


def test_requests_that_found_the_waiting_room_full_are_demand_and_other_refusals_are_not() -> None:
    metrics = frontend()
    answer(metrics)
    metrics.count_refusal("completions", "overload")
    metrics.count_refusal("completions", "validation")
    metrics.record("m", "completions", is_stream=False).finish("overload", 5)  # a worker's 429
    assert traffic_of(30.0, read(metrics)).requests == 3


def test_the_lengths_are_the_frontends_histograms_with_the_exact_mean() -> None:
    metrics = frontend()
    for tokens in (0, 50, 150, 200_000):
        answer(metrics, isl=tokens)
    isl = traffic_of(30.0, read(metrics)).isl
    assert isl
    assert isl.upper_bounds_tokens == INPUT_TOKENS[1:]
    assert isl.counts == (2, 1, *(0 for _ in INPUT_TOKENS[3:]), 1)
    assert isl.mean_tokens == pytest.approx(200_200 / 4)


def without_buckets(seen: Counts) -> Counts:
    return {key: value for key, value in seen.items() if not key[0].endswith("_bucket")}


def mean_of_points(seen: Counts) -> float:
    """The mean prompt length that a demand is sized with, tokens."""
    isl = traffic_of(30.0, seen).isl
    assert isl
    return points_of(isl, 1_000_000).moment(1)


def test_sum_and_count_without_buckets_are_requests_of_the_mean_length() -> None:
    metrics = frontend()
    for tokens in (2000, 4000):
        answer(metrics, isl=tokens)
    seen = without_buckets(read(metrics))
    isl = traffic_of(30.0, seen).isl
    assert isl
    assert isl.mean_tokens == 3000
    assert mean_of_points(seen) == pytest.approx(3000, abs=1)


@pytest.mark.parametrize(
    ("bounds", "mean"),
    [
        ({"100": 0.0, "+Inf": 10.0}, 3000.0),
        ({"100": 5.0, "+Inf": 10.0}, 160.0),
        ({"+Inf": 10.0}, 3000.0),
        ({"5000": 10.0}, 3000.0),
        ({"100": 5.0, "+Inf": 10.0}, 120.0),
    ],
    ids=["far above", "above, with some below", "one for all", "no last one", "within"],
)
def test_buckets_that_are_too_coarse_for_the_mean_do_not_lessen_it(
    bounds: dict[str, float], mean: float
) -> None:
    seen: Counts = {(f"{ISL}_bucket", le): count for le, count in bounds.items()}
    seen |= {(f"{ISL}_sum", ""): 10 * mean, (f"{ISL}_count", ""): 10.0}
    assert mean_of_points(seen) == pytest.approx(mean, abs=1)


def test_a_source_without_buckets_beside_one_with_buckets_is_not_taken_for_the_longest() -> None:
    metrics = frontend()
    answer(metrics, isl=3000)
    both = read(metrics)
    for key, value in without_buckets(both).items():
        both[key] += value
    assert mean_of_points(both) == pytest.approx(3000, abs=1)
    isl = traffic_of(30.0, both).isl
    assert isl
    assert isl.counts[-1] == 0


def test_a_frontend_that_nobody_asked_anything_has_no_requests_and_no_means() -> None:
    seen = traffic_of(30.0, read(frontend()))
    assert seen.requests == 0
    assert (seen.isl_tokens, seen.osl_tokens, seen.ttft_ms, seen.itl_ms, seen.duration_ms) == (None,) * 5
    assert (seen.isl, seen.osl, seen.missing) == (None, None, "")


def test_what_is_no_frontends_metrics_is_an_error_and_nothing_yet_is_not() -> None:
    exposition = Exposition("mine", "ns")
    assert exposition.read(b"") == {}
    with pytest.raises(ValueError, match="mine_"):
        exposition.read(frontend().render())


def test_what_was_counted_before_is_not_counted_again() -> None:
    metrics = frontend()
    answer(metrics, isl=1000)
    before = read(metrics)
    answer(metrics, isl=10)
    now = read(metrics)
    assert not has_restarted(before, now)
    seen = traffic_of(30.0, increase(before, now))
    assert (seen.requests, seen.isl_tokens) == (1, 10)
    assert seen.isl is not None
    assert seen.isl.total == 1


def test_a_count_that_falls_means_a_new_process_and_a_sum_that_rounds_otherwise_does_not() -> None:
    before: Counts = {(REQUESTS, ""): 3.0, (f"{TTFT}_sum", ""): 0.3}
    assert has_restarted(before, {(REQUESTS, ""): 2.0, (f"{TTFT}_sum", ""): 9.0})
    rounded: Counts = {(REQUESTS, ""): 3.0, (f"{TTFT}_sum", ""): 0.29999999}
    assert not has_restarted(before, rounded)
    assert increase(before, rounded)[f"{TTFT}_sum", ""] == 0


def test_means_are_over_requests_not_over_frontends() -> None:
    seen: Counts = {}
    for count, mean in ((99, 10.0), (1, 1000.0)):
        for key, value in (((f"{OSL}_sum", ""), count * mean), ((f"{OSL}_count", ""), float(count))):
            seen[key] = seen.get(key, 0.0) + value
    assert traffic_of(30.0, seen).osl_tokens == pytest.approx(19.9)
    assert traffic_of(30.0, seen | {(f"{ISL}_count", ""): 0.0}).isl_tokens is None


def test_dispersion_is_the_sample_variance_over_the_mean() -> None:
    assert dispersion([(1.0, each) for each in (4, 4, 4, 4, 4)]) == 0
    assert dispersion([(1.0, each) for each in (2, 4, 4, 4, 5, 5, 7, 9)]) == pytest.approx(32 / 7 / 5)


def test_dispersion_does_not_take_a_longer_pull_for_a_burst() -> None:
    assert dispersion([(1.0, 4), (1.0, 4), (3.0, 12), (1.0, 4), (0.5, 2)]) == pytest.approx(0)


def test_dispersion_wants_five_pulls_and_a_request() -> None:
    assert dispersion([(1.0, 4)] * 4) is None
    assert dispersion([(1.0, 0)] * 9) is None


def test_the_hit_rate_is_of_the_answers_that_state_what_was_cached() -> None:
    metrics = frontend()
    answer(metrics, isl=400)
    assert traffic_of(30.0, read(metrics)).prefix_hit_rate is None
    for cached_tokens in (300, 340):
        metrics.record("m", "completions", is_stream=True).finish("", 400, Usage(400, 50, cached_tokens))
    assert traffic_of(30.0, read(metrics)).prefix_hit_rate == 0.8
    metrics.record("m", "completions", is_stream=True).finish("", 1, Usage(1, 1, 90_000))
    assert traffic_of(30.0, read(metrics)).prefix_hit_rate == 1.0


def test_of_several_models_one_without_a_request_has_none_and_refusals_of_unknown_ones_are_not_its_own() -> (
    None
):
    metrics = frontend()
    answer(metrics, "a")
    metrics.count_refusal("completions", "overload")
    alone = Exposition(DEFAULT_PREFIX, "ns", "b")
    several = Exposition(DEFAULT_PREFIX, "ns", "b", is_one_of_several=True)
    assert alone.read(metrics.render()) != {}
    assert alone.served.unserved == "served-model-name is 'b', and the frontends have served 'a' only"
    assert several.read(metrics.render()).get((REQUESTS, ""), 0.0) == 0.0
    assert several.served.unserved == ""


def test_a_model_with_a_promise_of_its_own_has_its_misses_counted_by_that() -> None:
    now_s = iter(range(100))
    promised = {"a": (500.0, 20.0)}
    metrics = FrontendMetrics("ns", lambda: float(next(now_s)), promised_by_model=promised)
    for model in ("a", "b"):
        record = metrics.record(model, "completions", is_stream=True)
        record.observe(1)
    of_a, of_b = (Exposition(DEFAULT_PREFIX, "ns", each, is_one_of_several=True) for each in ("a", "b"))
    assert traffic_of(30.0, of_a.read(metrics.render())).over_ttft == ((500.0, 1.0),)
    assert traffic_of(30.0, of_b.read(metrics.render())).over_ttft == ()


def test_the_counts_of_each_model_are_read_in_one_pass_whatever_its_name() -> None:
    name = "dynamo_frontend_requests_started_total"
    text = "\n".join(
        [
            f'{name}{{dynamo_namespace="ns",model="ant"}} 2',
            f'{name}{{dynamo_namespace="ns",model="a\\"b\\\\c"}} 3',
            f'{name}{{dynamo_namespace="other",model="ant"}} 50',
        ]
    )
    read = Exposition("dynamo_frontend", "ns").read_by_model(text.encode())
    assert read == {"ant": {(REQUESTS, ""): 2.0}, 'a"b\\c': {(REQUESTS, ""): 3.0}}
