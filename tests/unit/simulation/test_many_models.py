from __future__ import annotations

from itertools import islice, pairwise
from math import inf

import pytest

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.models.model import Device, ModelPolicy, ModelState, ModelStatus, SleepLevel
from dynaplan.simulation.many_models.box import FREE_S, Box, BoxPolicy, SimulatedModel
from dynaplan.simulation.many_models.call_chains import Chain, ChainCall, chains_of, length_s, made_up
from dynaplan.simulation.many_models.comparison import BoxOutcome, compare, simulate
from dynaplan.simulation.many_models.policies import Dynaplan, OwnGpu
from dynaplan.util.errors import ConfigError
from tests.bench.rivals import LeastRecentlyUsed, LlamaSwap, Ollama, always_fitting, policies

LOAD_S = 10.0


def model(size: int = 10, load_s: float = LOAD_S, slots: int = 8, **changes: object) -> SimulatedModel:
    own = ModelPolicy(claim_bytes=size, estimate_load_s=load_s, **{"ttl_s": 0.0, **changes})  # type: ignore[arg-type]
    return SimulatedModel(own, load_s, itl_s=1.0, slots=slots)


def asks(name: str, at_s: float = 0.0, answer_s: int = 2) -> Chain:
    return Chain(at_s, (ChainCall(name, 0, answer_s),), inf)


def run(policy: BoxPolicy, *chains: Chain, gpus: int = 1, **models: SimulatedModel) -> Box:
    box = Box(tuple(Device(index, 16) for index in range(gpus)), models, policy)
    box.run(sorted(chains, key=lambda each: each.begin_s), 100.0)
    return box


def waits(box: Box) -> list[float]:
    return [request.admitted_s - request.arrival_s for request in box.requests]


def test_a_request_waits_for_the_load_and_the_next_one_finds_the_model_ready() -> None:
    box = run(Dynaplan(), asks("a"), asks("a", 20), a=model())
    assert waits(box) == [LOAD_S, 0]
    assert [request.was_ready for request in box.requests] == [False, True]
    assert [request.end_s for request in box.requests] == [12, 22]


def test_a_swap_takes_the_drain_the_memory_and_the_load() -> None:
    box = run(Dynaplan(), asks("a", answer_s=20), asks("b", 25), a=model(), b=model())
    assert waits(box) == [LOAD_S, 5 + FREE_S + LOAD_S]


def test_a_worker_answers_as_many_as_it_has_slots() -> None:
    box = run(Dynaplan(), *[asks("a", 20, answer_s=3)] * 4, a=model(slots=2))
    assert [request.begun_s for request in box.requests] == [30, 30, 33, 33]


def test_a_burst_gets_a_second_worker_which_takes_its_share_and_leaves_for_another_model() -> None:
    asked = [asks("a", at_s, answer_s=30) for at_s in (20, 21, 22, 33)]
    grows = model(max_workers=2, requests_per_worker=2, slots=3)
    box = run(Dynaplan(), asks("a"), *asked, asks("b", 45), gpus=2, a=grows, b=model())
    assert [request.begun_s for request in box.requests[1:5]] == [20, 21, 22, 33]
    assert waits(box)[5] == 33 + 30 + FREE_S + LOAD_S - 45
    assert not any(request.is_cut or request.refused for request in box.requests)


def test_a_second_worker_goes_on_as_the_first_when_that_has_left() -> None:
    box = Box((Device(0, 16),), {"a": model(max_workers=2)}, Dynaplan())
    box.further["a", 2].status = ModelStatus("a (worker 2)", ModelState.READY, placed_on=(0,))
    box.run([asks("a")], 10.0)
    assert waits(box) == [0.0]
    assert box.workers["a"].status.name == "a"


def test_a_sleeper_wakes_sooner_than_a_model_loads() -> None:
    light = SleepLevel("1", wake_s=1.0, kept_bytes=2)
    box = run(Dynaplan(), asks("a"), asks("a", 45), a=model(ttl_s=20.0, sleep_levels=(light,)))
    assert waits(box) == [LOAD_S, 1.0]
    assert box.loads == 1


def test_a_load_that_nobody_waits_for_any_more_is_given_up_for_another_model() -> None:
    box = run(Dynaplan(), asks("a"), asks("b", 6), a=model(load_timeout_s=5.0), b=model())
    assert [request.refused for request in box.requests] == [503, 0]
    assert waits(box)[1] == LOAD_S  # its memory was free again when the other was asked for
    assert box.workers["a"].status.state is ModelState.UNLOADED


def test_a_chain_asks_on_when_it_has_its_answer_and_has_thought() -> None:
    calls = (ChainCall("a", 0, 2), ChainCall("a", 0, 2, think_s=3.0), ChainCall("a", 0, 2, think_s=100.0))
    box = run(Dynaplan(), Chain(0.0, calls, end_s=50.0), a=model())
    assert [request.arrival_s for request in box.requests] == [0, 15]


def test_a_request_that_is_refused_or_never_answered_is_lost() -> None:
    outcome = simulate([asks("a")], {"a": model(size=20)}, [Device(0, 16)], 100.0, Dynaplan())
    assert (outcome.requests, outcome.lost, outcome.wait_longest_s) == (1, 1, 0)
    assert simulate([], {"a": model()}, [Device(0, 16)], 0.0, Dynaplan()).requests == 0


# The rivals, as their sources and issues say


def test_llama_swap_does_not_swap_out_a_busy_model_however_long_another_waits() -> None:
    busy = [asks("a", at_s, answer_s=4) for at_s in range(0, 90, 3)]
    theirs = run(LlamaSwap(), *busy, asks("b", 12), a=model(), b=model())
    ours = run(Dynaplan(), *busy, asks("b", 12), a=model(), b=model())
    assert max(waits(theirs)) > 80 > 60 > max(waits(ours))


def test_llama_swap_serves_a_b_c_a_b_c_in_groups() -> None:
    chains = [asks(name, at_s) for at_s, name in enumerate("abcabc")]
    assert run(LlamaSwap(), *chains, a=model(), b=model(), c=model()).loads == 3


def test_ollamas_pending_request_blocks_even_those_of_a_loaded_model() -> None:
    chains = [asks("a", answer_s=20), asks("b", 15), asks("a", 16)]
    box = run(Ollama(), *chains, a=model(), b=model())
    assert box.requests[2].admitted_s > box.requests[1].admitted_s > box.requests[0].end_s
    assert box.loads == 3


def test_ollama_loads_beside_each_other_what_fits() -> None:
    box = run(Ollama(), asks("a"), asks("b", 1), asks("b", 2), a=model(6), b=model(6))
    assert waits(box) == [LOAD_S, LOAD_S, LOAD_S - 1]


def test_a_request_for_a_model_that_ollama_is_putting_away_loads_it_again() -> None:
    box = run(Ollama(), asks("a"), asks("a", 17.2), a=model(ttl_s=5.0))
    assert waits(box) == [LOAD_S, pytest.approx(0.3 + LOAD_S)]


def test_the_least_recently_used_is_ended_whatever_it_does() -> None:
    box = run(LeastRecentlyUsed(1), asks("a", answer_s=50), asks("b", 20), a=model(), b=model())
    assert [request.is_cut for request in box.requests] == [True, False]
    assert waits(box)[1] == FREE_S + LOAD_S


def test_as_many_models_are_kept_as_always_fit() -> None:
    models = {"a": model(12), "b": model(10), "c": model(4), "d": model(1)}
    assert always_fitting(models, [Device(0, 16), Device(1, 16)]) == 4
    assert always_fitting(models, [Device(0, 16)]) == 1
    assert always_fitting(models, [Device(0, 8)]) == 1


def test_rivals_put_away_what_is_idle_too() -> None:
    for policy in (LlamaSwap(), Ollama(), LeastRecentlyUsed(1)):
        box = run(policy, asks("a"), a=model(ttl_s=5.0))
        assert box.workers["a"].status.state is ModelState.UNLOADED


def test_with_a_gpu_for_each_model_nobody_waits() -> None:
    box = run(OwnGpu(), asks("a", 20), asks("b", 20), gpus=2, a=model(), b=model())
    assert waits(box) == [0, 0]


# Load


def by_policy(load: str) -> dict[str, BoxOutcome]:
    gb = {"a": 20, "b": 13, "c": 13, "d": 7, "e": 7, "f": 1}
    models = {name: SimulatedModel(ModelPolicy(claim_bytes=size), size) for name, size in gb.items()}
    devices = [Device(0, 24), Device(1, 24)]
    outcomes = compare(
        lambda: made_up(load, list(gb), 1), models, devices, length_s(load), policies(models, devices)
    )
    return {outcome.policy: outcome for outcome in outcomes}


@pytest.mark.parametrize("load", ["popularity:duration=1200", "groups", "agents:duration=1200"])
def test_more_requests_are_in_time_than_with_any_rival_for_the_same_memory(load: str) -> None:
    outcomes = by_policy(load)
    ours, alone = outcomes.pop("dynaplan"), outcomes.pop("own-gpu")
    assert set(outcomes) == {"llama-swap", "ollama", "lru-2"}
    assert ours.in_time > max(each.in_time for each in outcomes.values())
    assert ours.wait_p95_s < min(each.wait_p95_s for each in outcomes.values() if not each.lost)
    assert ours.lost == 0
    assert alone.gpu_hours == pytest.approx(6 * length_s(load) / 3600)
    assert ours.gpu_hours < alone.gpu_hours / 2


def test_popular_models_are_asked_more_by_zipfs_law() -> None:
    asked = [next(iter(each.calls)).model for each in made_up("popularity:skew=1,rate=5", list("abc"), 1)]
    assert asked.count("a") / len(asked) == pytest.approx(6 / 11, rel=0.05)
    assert asked.count("c") / len(asked) == pytest.approx(2 / 11, rel=0.1)


def test_groups_are_bursts_with_pauses_in_order() -> None:
    chains = list(made_up("groups:rate=1,burst=10,pause=100", list("ab"), 2))
    times = [each.begin_s for each in chains]
    assert times == sorted(times)
    assert max(later - earlier for earlier, later in pairwise(times)) > 20


def test_an_agent_asks_its_own_model_between_its_helpers() -> None:
    (agent,) = made_up("agents:agents=1,think=1", list("abc"), 1)
    calls = list(islice(agent.calls, 6))
    assert [call.model for call in calls] == list("abacab")
    assert all(call.think_s > 0 for call in calls)


def test_the_same_seed_makes_the_same_load() -> None:
    text = "popularity:duration=100"
    assert list(made_up(text, ["a"], 1)) == list(made_up(text, ["a"], 1)) != list(made_up(text, ["a"], 2))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("groups:paus=1", "has no 'paus'(?s:.*)'pause'"),
        ("agents:agents=x", "agents is 'x'"),
        ("groups:rate=0", "0"),
    ],
)
def test_a_wrong_parameter_says_what_was_expected(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        made_up(text, ["a"], 1)


def test_a_trace_with_models_is_one_call_each() -> None:
    (chain,) = chains_of([TracedRequest(3.0, 5, 7, model="a")], ["a"])
    assert (chain.begin_s, list(chain.calls)) == (3.0, [ChainCall("a", 5, 7)])
    with pytest.raises(ConfigError, match=r"at 3 s is for the model 'qwem'(?s:.*)Did you mean 'qwen'"):
        list(chains_of([TracedRequest(3.0, 5, 7, model="qwem")], ["qwen"]))
