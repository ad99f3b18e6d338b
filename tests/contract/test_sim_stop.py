"""The simulated engine honours ``stop`` as vLLM's OpenAI server does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.engine_workers import Worker

PROMPT = {"prompt": "hello", "max_tokens": 200}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
BEGINNING = "This is dynaplan's simulated engine: no model runs here, the words only keep its pace. "


async def answered(worker: Worker, **fields: Any) -> tuple[str, str, int]:
    """Text, finish reason and computed tokens, which a stream tells as well."""
    status, answer = await worker.ask({**PROMPT, **fields})
    assert status == 200, answer
    choice = answer["choices"][0]
    *events, usage = await worker.stream({**PROMPT, **fields, "stream_options": {"include_usage": True}})
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert usage["usage"] == answer["usage"]
    return choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9, 40])
@pytest.mark.parametrize("begin", [0, 1, 8, 30])
async def test_an_answer_ends_before_its_stop_text_wherever_tokens_begin(
    worker: Worker, begin: int, length: int
) -> None:
    stop = BEGINNING[begin : begin + length]
    text, reason, tokens = await answered(worker, stop=stop)
    assert (text, reason) == (BEGINNING[: BEGINNING.find(stop)], "stop")
    assert tokens == -(-(BEGINNING.find(stop) + length) // 4)


async def test_of_several_the_first_that_is_complete_ends_the_answer(worker: Worker) -> None:
    text, reason, _ = await answered(worker, stop=["no such text", "words", "engine", "\n"])
    assert (text, reason) == ("This is dynaplan's simulated ", "stop")


async def test_a_stop_text_that_does_not_come_changes_nothing(worker: Worker) -> None:
    assert (await answered(worker, stop=["no such text"]))[1:] == ("length", 200)
    assert await answered(worker, stop=None) == await answered(worker, stop=[]) == await answered(worker)


async def test_an_answer_that_ends_by_itself_may_be_stopped_before(worker: Worker) -> None:
    text, reason, _ = await answered(worker, max_tokens=None, stop=".")
    assert text.startswith("This is dynaplan's simulated engine: no model runs here")
    assert "." not in text
    assert reason == "stop"


async def test_a_chat_is_stopped_too_and_its_text_may_be_kept(worker: Worker) -> None:
    body = {**CHAT, "stop": "engine", "include_stop_str_in_output": True}
    _, answer = await worker.ask(body, "/v1/chat/completions")
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "This is dynaplan's simulated engine"
    assert choice["finish_reason"] == "stop"


async def test_no_stop_text_counts_before_the_least_tokens(worker: Worker) -> None:
    text, reason, tokens = await answered(worker, stop="s", min_tokens=5)
    assert text == BEGINNING[: BEGINNING.find("s", 20)]
    assert (reason, tokens) == ("stop", 1 + BEGINNING.find("s", 20) // 4)


@pytest.mark.parametrize("stop", [5, "", [""], ["a", 5], {"a": 1}, True, ["x"] * 65, [["x"]]])
async def test_what_is_no_stop_text_is_refused(worker: Worker, stop: Any) -> None:
    status, answer = await worker.ask({**PROMPT, "stop": stop})
    assert status == 400
    assert "'stop' is" in answer["error"]["message"]
