from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from statistics import mean, stdev

import pytest

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.planner.forecasting.traffic_history import interval_history
from dynaplan.simulation.traces.reading import SPREAD_S, scale_rate
from dynaplan.simulation.traces.synthetic import BLOCK_TOKENS, KINDS, PLACES, is_synthetic, synthetic
from dynaplan.util.errors import ConfigError


def rates(text: str, interval_s: float) -> list[float]:
    return [each.requests / interval_s for each in interval_history(synthetic(text), interval_s)]


@pytest.mark.parametrize("kind", KINDS)
def test_load_is_the_same_for_the_same_text_and_another_for_another_seed(kind: str) -> None:
    trace = list(synthetic(kind))
    assert trace == list(synthetic(f"{kind}:seed=1"))
    assert trace != list(synthetic(f"{kind}:seed=2"))
    assert all(one.arrival_s <= other.arrival_s for one, other in pairwise(trace))
    assert trace[0].arrival_s >= 0 and trace[-1].arrival_s < 600
    if kind != "conversations":
        assert {(each.prompt_tokens, each.output_tokens) for each in trace} == {(3000, 150)}


def test_a_sinusoid_begins_at_its_lowest_and_repeats() -> None:
    seen = rates("sinusoid:low=5,high=20,period=150,duration=1500", 15)
    for index, rate in enumerate(seen):
        expected = 12.5 - 7.5 * math.cos(2 * math.pi * (index * 15 + 7.5) / 150)
        assert rate == pytest.approx(expected, abs=4 * math.sqrt(expected / 15))


def test_a_ramp_a_step_and_on_off_have_the_rates_they_say() -> None:
    assert rates("ramp:low=0,high=60,duration=600", 100) == pytest.approx([5, 15, 25, 35, 45], rel=0.15)
    assert rates("step:low=10,high=40,at=200,duration=420", 100) == pytest.approx([10, 10, 40, 40], rel=0.15)
    assert rates("onoff:low=0,high=30,on=100,off=50,duration=350", 50) == pytest.approx(
        [30, 30, 0, 30, 30, 0], rel=0.15
    )


def test_poisson_arrivals_vary_as_much_as_their_number_and_even_ones_do_not() -> None:
    poisson = [each * 10 for each in rates("poisson:rate=10,duration=5000", 10)]
    assert stdev(poisson) ** 2 / mean(poisson) == pytest.approx(1.0, abs=0.2)
    assert set(rates("constant:rate=10,noise=0,duration=100", 10)) == {10.0}


def test_constant_load_has_the_noise_that_was_asked_for() -> None:
    seen = rates("constant:rate=20,noise=0.05,duration=5000", 10)
    assert mean(seen) == pytest.approx(20, rel=0.01)
    assert stdev(seen) / mean(seen) == pytest.approx(0.05, rel=0.15)


def test_lengths_have_the_mean_and_the_variation_that_were_asked_for() -> None:
    trace = list(synthetic("poisson:rate=20,duration=1000,isl=2000,isl-cv=0.5,osl=100"))
    lengths = [each.prompt_tokens for each in trace]
    assert mean(lengths) == pytest.approx(2000, rel=0.03)
    assert stdev(lengths) / mean(lengths) == pytest.approx(0.5, rel=0.1)
    assert {each.output_tokens for each in trace} == {100}


def test_a_name_alone_is_load_and_a_path_is_not() -> None:
    assert is_synthetic("ramp") and is_synthetic("ramp:low=1")
    assert not is_synthetic("./ramp.csv") and not is_synthetic("trace.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sinus:low=1", "no load is called 'sinus'\n.*'sinusoid'"),
        ("sinusoid:hgih=3", "'sinusoid:hgih=3' has no 'hgih'\n.*'high'"),
        ("ramp:low=lots", "low is 'lots'\n.*a number, 0 or more"),
        ("ramp:low", "low is ''\n.*a number"),
        ("sinusoid:period=0", "period is '0'\n.*0.1 or more"),
        ("poisson:rate=inf", "rate is 'inf'"),
    ],
)
def test_a_wrong_text_is_refused_at_once(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        synthetic(text)


# -- denser and faster -----------------------------------------------------------------------------------


def test_scaling_multiplies_the_requests_and_keeps_the_time() -> None:
    trace = list(synthetic("sinusoid:duration=300"))
    tripled = list(scale_rate(trace, 3))
    assert len(tripled) == 3 * len(trace)
    assert all(one.arrival_s <= other.arrival_s for one, other in pairwise(tripled))
    assert tripled[-1].arrival_s < trace[-1].arrival_s + SPREAD_S
    before, after = interval_history(trace, 30), interval_history(tripled, 30)
    for one, other in zip(before, after, strict=False):
        assert other.requests == pytest.approx(3 * one.requests, rel=0.15)


def test_scaling_by_a_fraction_adds_or_leaves_out_that_many() -> None:
    trace = list(synthetic("poisson:rate=20"))
    for scale in (0.25, 1.5):
        assert len(list(scale_rate(trace, scale))) == pytest.approx(scale * len(trace), rel=0.05)
        assert list(scale_rate(trace, scale)) == list(scale_rate(trace, scale))
    assert list(scale_rate(trace, 1)) == trace


def test_copies_share_prefixes_with_their_like_only() -> None:
    trace = [TracedRequest(float(at_s), 128, 1, (7, 8), 64) for at_s in range(2)]
    hashes = [each.block_hashes for each in scale_rate(trace, 2)]
    assert len(set(hashes)) == 2
    assert sorted(map(hashes.count, set(hashes))) == [2, 2]


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_a_factor_that_is_none_is_refused_at_once(factor: float) -> None:
    with pytest.raises(ConfigError, match="Expected a number, more than 0"):
        scale_rate([], factor)


SYSTEM = 1000
SHARED = SYSTEM // BLOCK_TOKENS
TEXT = f"conversations:rate=2,turns=5,system={SYSTEM},isl=160,osl=320,think=10,duration=400"


def by_conversation(trace: list[TracedRequest]) -> list[list[TracedRequest]]:
    found = defaultdict(list)
    for each in trace:
        found[each.block_hashes[SHARED] // PLACES].append(each)
    return list(found.values())


def test_every_turn_begins_with_the_whole_turn_before_it_and_its_answer() -> None:
    for turns in by_conversation(list(synthetic(TEXT))):
        for before, after in pairwise(turns):
            assert after.prompt_tokens == before.prompt_tokens + 320 + 160
            assert after.block_hashes[: len(before.block_hashes)] == before.block_hashes
            assert after.arrival_s >= before.arrival_s + 320 / 50


def test_conversations_share_the_system_prompt_and_nothing_else() -> None:
    conversations = [
        {block for turn in turns for block in turn.block_hashes}
        for turns in by_conversation(list(synthetic(TEXT)))
    ]
    for one, other in pairwise(conversations):
        assert one & other == set(range(SHARED))


def test_only_full_blocks_have_ids() -> None:
    assert all(len(each.block_hashes) == each.prompt_tokens // BLOCK_TOKENS for each in synthetic(TEXT))


def test_there_are_as_many_conversations_and_turns_as_were_asked_for() -> None:
    text = "conversations:rate=5,turns=4,think=1,osl=10,duration=2000"
    conversations = by_conversation(list(synthetic(text)))
    assert len(conversations) == pytest.approx(10_000, rel=0.05)
    assert mean(map(len, conversations)) == pytest.approx(4, rel=0.05)


def test_without_a_rate_nothing_comes() -> None:
    assert list(synthetic("conversations:rate=0")) == []
