"""The simulated engine's text consists of whole words, wherever it ends."""

from __future__ import annotations

import pytest

from dynaplan.engines.sim.api import FILLER_TEXT, INTRODUCTION, AnswerText, Rendering, read_request
from dynaplan.engines.timing_model.tokens import BYTES_PER_TOKEN

WORDS = {*INTRODUCTION.split(), *FILLER_TEXT.split()}


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 10, 20, 21, 22, 30, 99])
def test_an_answer_of_any_length_is_whole_words(tokens: int) -> None:
    text = AnswerText(seed=1)
    body = {"model": "m", "prompt": "hello there", "max_tokens": tokens}
    asked = text.apply_stops(read_request(body, is_chat=False, model="m", context_tokens=1000))
    answer = b"".join(Rendering(asked, text, "1")._pieces(0, tokens)).decode()
    assert set(answer.split()) <= WORDS, answer
    assert "  " not in answer
    assert len(INTRODUCTION) % BYTES_PER_TOKEN == 0
