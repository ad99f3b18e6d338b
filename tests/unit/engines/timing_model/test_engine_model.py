"""The options of the simulated engine: defaults, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dynaplan.config.settings.fields import options_of
from dynaplan.config.settings.worker import SimOptions
from dynaplan.engines.timing_model.engine_model import EngineSettings, RequestState
from dynaplan.util.errors import ConfigError
from tests.unit.engines.models import request, run, small_model, step


def test_an_empty_section_means_the_documented_defaults() -> None:
    options = SimOptions.from_options({})
    settings = EngineSettings.of(options, 945_029)
    assert (settings.block_tokens, settings.context_tokens, settings.total_blocks) == (16, 16_384, 59_064)
    assert (settings.batched_tokens, settings.request_slots, settings.is_prefix_caching) == (8192, 256, True)
    assert (options.speedup_ratio, options.startup_time_s, settings.jitter, settings.seed) == (
        1.0,
        0.0,
        0.0,
        0,
    )


def test_options_of_others_are_left_alone() -> None:
    assert SimOptions.from_options({"remote-prefill": True, "kv-transfer-config": "{}"}) == SimOptions()


def test_the_block_override_wins_over_kv_tokens_and_bounds_the_default_context() -> None:
    section = {"num-gpu-blocks-override": 100, "kv-total-tokens": 9, "block-size": 32}
    settings = EngineSettings.of(SimOptions.from_options(section), 945_029)
    assert (settings.total_blocks, settings.context_tokens) == (100, 3200)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", ""),
        ("model", 7),
        ("profile", " "),
        ("block-size", 0),
        ("block-size", "16"),
        ("max-model-len", -1),
        ("max-num-batched-tokens", 1.5),
        ("max-num-seqs", True),
        ("enable-prefix-caching", 1),
        ("tensor-parallel-size", 0),
        ("num-gpu-blocks-override", 0),
        ("kv-total-tokens", -5),
        ("speedup-ratio", -1),
        ("speedup-ratio", float("nan")),
        ("startup-time", "soon"),
        ("seed", -1),
        ("jitter", 0.9),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_what_was_expected(key: str, value: Any) -> None:
    assert key in options_of(SimOptions)
    with pytest.raises(ConfigError) as refusal:
        SimOptions.from_options({key: value})
    assert key in str(refusal.value)
    assert repr(value) in str(refusal.value)
    assert "Expected" in str(refusal.value)


def test_a_budget_below_the_number_of_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="max-num-batched-tokens is 100"):
        SimOptions.from_options({"max-num-batched-tokens": 100})


def test_a_context_that_does_not_fit_the_kv_cache_is_refused() -> None:
    options = SimOptions.from_options({"max-model-len": 4096, "num-gpu-blocks-override": 100})
    with pytest.raises(ConfigError, match="max-model-len is 4096"):
        EngineSettings.of(options, 945_029)


def test_a_request_gets_its_first_token_from_the_prefill_and_the_others_from_decode_steps() -> None:
    model = small_model()
    model.submit(request("a", 10, 3))
    first, second, third = run(model)
    assert first.first_token_requests == ["a"]
    assert [first.tokens, second.tokens, third.tokens] == [1, 1, 1]
    assert third.finished == ["a"]
    assert [each.duration_s for each in (first, second, third)] == pytest.approx([0.020, 0.003, 0.003])


def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget_and_costs_its_fixed_part_once() -> None:
    model = small_model()
    model.submit(request("a", 80, 1))
    steps = run(model)
    assert [each.duration_s for each in steps] == pytest.approx([0.042, 0.032, 0.016])
    assert [each.tokens for each in steps] == [0, 0, 1]


def test_decodes_come_first_and_prefill_chunks_get_the_rest_of_the_budget() -> None:
    model = small_model()
    model.submit(request("a", 4, 100))
    model.step()
    model.submit(request("b", 62, 1))
    steps = [step(model) for _ in range(2)]
    assert [each.tokens for each in steps] == [1, 2]  # 31 + 31 prompt tokens beside one decode each
    assert steps[1].finished == ["b"]
    # decode (3) + chunk (31) + what the prefill's fixed 10 ms exceed the fixed 3 ms of decoding, once
    assert [each.duration_s for each in steps] == pytest.approx([0.041, 0.034])


def test_prompts_are_served_in_the_order_they_came() -> None:
    model = small_model()
    for name in "abc":
        model.submit(request(name, 24, 1))
    assert [each.finished for each in run(model)] == [["a"], ["b"], ["c"]]


def test_more_requests_than_slots_wait() -> None:
    model = small_model(request_slots=2)
    for name in "abc":
        model.submit(request(name, 4, 5))
    model.step()
    load = model.load()
    assert (load.running_requests, load.waiting_requests, load.request_slots) == (2, 1, 2)
    run(model)
    assert model.totals.finished_requests == 3


def test_a_known_prefix_is_not_computed_again() -> None:
    model = small_model()
    prompt = list(range(20))
    first, second = request("a", prompt, 1), request("b", [*prompt, 99, 98], 1)
    model.submit(first)
    run(model)
    model.submit(second)
    (only,) = run(model)
    assert (first.cached_tokens, second.cached_tokens) == (0, 20)
    assert only.duration_s == pytest.approx(0.012)
    assert model.load().prefix_hit_rate == pytest.approx(20 / 42)


def test_the_last_prompt_token_is_always_computed() -> None:
    model = small_model()
    for name in "ab":
        repeated = request(name, list(range(20)), 1)
        model.submit(repeated)
        run(model)
    assert repeated.cached_tokens == 16


def test_without_prefix_caching_nothing_is_shared() -> None:
    model = small_model(is_prefix_caching=False)
    for name in "ab":
        repeated = request(name, list(range(20)), 1)
        model.submit(repeated)
        run(model)
    assert repeated.cached_tokens == 0


def test_shared_blocks_count_once() -> None:
    model = small_model()
    prompt = list(range(16))
    for name in "ab":
        model.submit(request(name, [*prompt, ord(name)], 50))
        model.step()
    assert model.blocks.used == 4 + 1 + 1


def test_the_prefix_unused_for_longest_makes_room_first() -> None:
    model = small_model(total_blocks=8, context_tokens=32)
    prompts = {name: [ord(name)] * 13 for name in "abc"}  # 4 blocks each, 3 of them findable
    for name in "abac":  # c needs a place: b's is the one unused for longest
        model.submit(request(name, prompts[name], 1))
        run(model)
    kept = request("a2", prompts["a"], 1)
    model.submit(kept)
    run(model)
    assert kept.cached_tokens == 12
    lost = request("b2", prompts["b"], 1)
    model.submit(lost)
    run(model)
    assert lost.cached_tokens < 12


def test_without_a_free_block_the_newest_request_is_preempted_and_computed_again_first() -> None:
    model = small_model(total_blocks=10, context_tokens=40)
    old, new = request("old", 16, 20), request("new", 16, 20)
    model.submit(old)
    model.submit(new)
    steps = run(model)
    assert sum(each.preemptions for each in steps) == 1
    order = [name for each in steps for name in each.finished]
    assert order == ["old", "new"]
    assert model.emitted_tokens(old) == model.emitted_tokens(new) == 20
    assert model.totals.preemptions == 1
    assert model.totals.generated_tokens == 40


def test_a_preempted_request_waits_before_all_others() -> None:
    model = small_model(total_blocks=10, context_tokens=40)
    for name in ("old", "new"):
        model.submit(request(name, 16, 20))
    model.step()
    model.submit(request("later", 12, 20))
    order = [name for each in run(model) for name in each.finished]
    assert order == ["old", "new", "later"]


def test_a_cancelled_request_frees_everything_wherever_it_stands() -> None:
    model = small_model(request_slots=2)
    for name, prompt in (("decoding", 4), ("prefilling", 200), ("waiting", 4)):
        model.submit(request(name, prompt, 50))
    model.step()
    model.step()
    for name in ("waiting", "decoding", "prefilling"):
        assert model.cancel(name)
    assert model.is_idle
    assert model.blocks.used == 0
    assert not model.cancel("decoding")


def test_a_held_request_keeps_its_blocks_until_they_are_taken() -> None:
    model = small_model()
    held = request("a", 10, 1, is_held=True)
    model.submit(held)
    run(model)
    assert (held.state, model.blocks.used) == (RequestState.HELD, 3)
    assert model.release("a")
    assert (held.state, model.blocks.used) == (RequestState.ENDED, 0)
    assert not model.release("a")


def test_kv_from_another_engine_costs_no_prefill() -> None:
    model = small_model()
    remote = request("a", list(range(20)), 2, is_remote=True)
    model.submit(remote)
    admission, first, second = run(model)
    assert admission.duration_s == 0.0
    assert [first.duration_s, second.duration_s] == pytest.approx([0.003, 0.003])
    assert [each.tokens for each in (admission, first, second)] == [0, 1, 1]
    assert model.totals.external_tokens == 20
    assert model.blocks.used == 0


def test_with_everything_held_a_step_is_empty_until_a_hand_off_is_taken() -> None:
    model = small_model(total_blocks=10, context_tokens=40)
    model.submit(request("held", 36, 1, is_held=True))
    run(model)
    model.submit(request("waits", 16, 1))
    assert model.step() is None
    model.release("held")
    assert step(model).finished == ["waits"]


@pytest.mark.parametrize(("prompt", "answer"), [(0, 1), (1, 0), (400, 1)])
def test_a_request_that_can_never_be_served_is_refused(prompt: int, answer: int) -> None:
    with pytest.raises(ValueError, match="tokens"):
        small_model().submit(request("a", prompt, answer))


def test_an_id_in_use_is_refused() -> None:
    model = small_model()
    model.submit(request("a", 4, 1))
    with pytest.raises(ValueError, match="already"):
        model.submit(request("a", 4, 1))


def test_steps_told_as_one_give_the_same_tokens_in_the_same_time() -> None:
    ends = []
    for horizon_s in (0.0, math.inf):
        model = small_model()
        for name, answer in (("a", 30), ("b", 7), ("c", 90)):
            model.submit(request(name, 9, answer))
        steps = run(model, horizon_s)
        ends.append((sum(each.tokens for each in steps), sum(each.duration_s for each in steps)))
    assert ends[0][0] == ends[1][0] == 127
    assert ends[0][1] == pytest.approx(ends[1][1])
    assert len(steps) == 4


def test_a_horizon_ends_the_fold_in_time() -> None:
    model = small_model()
    model.submit(request("a", 4, 300))
    model.step()
    assert step(model, 0.030).steps == 10


def test_jitter_is_bounded_and_the_same_for_the_same_seed() -> None:
    def durations(seed: int) -> list[float]:
        model = small_model(jitter=0.1, seed=seed)
        model.submit(request("a", 4, 100))
        return [each.duration_s for each in run(model)][1:]

    assert durations(1) == durations(1) != durations(2)
    assert all(0.0027 <= duration_s <= 0.0033 for duration_s in durations(1))
    assert max(durations(1)) - min(durations(1)) > 0.0004


def test_a_request_that_needs_more_blocks_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit 99 KV blocks"):
        small_model(total_blocks=99).submit(request("a", 300, 100))
