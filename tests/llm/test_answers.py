"""A model that knows something is asked something."""

from __future__ import annotations

import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import ask, prefills

QUESTION = [{"role": "user", "content": "Which city is the capital of France?"}]
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("pools", ["one_pool", "two_pools"])
def test_the_capital_of_france_is_paris(pools: str, request: pytest.FixtureRequest) -> None:
    deployment = request.getfixturevalue(pools)
    status, answer = ask(deployment, CHAT, messages=QUESTION, max_tokens=24, temperature=0)
    assert status == 200, answer
    text = answer["choices"][0]["message"]["content"]
    print(f"{pools}: {text!r} {answer['timings']}")
    assert "Paris" in text


def test_the_prompt_was_computed_by_the_prefill_worker(two_pools: Deployment) -> None:
    remote = prefills(two_pools).get("remote", 0)
    words = " ".join(f"The lights of the city number {number} were green." for number in range(30))
    question = [{"role": "user", "content": f"{words} Which city is the capital of France?"}]
    status, answer = ask(two_pools, CHAT, messages=question, max_tokens=24, temperature=0)
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] > 200
    print(f"{answer['choices'][0]['message']['content']!r} {answer['timings']}")
    assert answer["timings"]["prompt_n"] <= 1, answer["timings"]
    assert prefills(two_pools)["remote"] == remote + 1
