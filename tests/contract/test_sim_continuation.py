"""The simulated engine goes on with the beginning of an answer, as a model under greedy decoding does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.engine_workers import Worker

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def answered(worker: Worker, path: str, begun: str, **fields: Any) -> tuple[str, str, int]:
    """The rest of the answer that begins with ``begun``, its finish reason and its tokens."""
    if path == COMPLETIONS:
        body: dict[str, Any] = {"prompt": "Why is the sky blue? " + begun}
    else:
        body = {"messages": [{"role": "user", "content": "Why?"}]}
        if begun:
            body["messages"].append({"role": "assistant", "content": begun})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
    status, answer = await worker.ask({**body, **fields}, path)
    assert status == 200, answer
    choice = answer["choices"][0]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    return text, choice["finish_reason"], answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_begun_answer_and_its_rest_are_the_whole_answer_wherever_it_is_cut(
    worker: Worker, path: str
) -> None:
    whole, reason, tokens = await answered(worker, path, "", max_tokens=60)
    for characters in (4, 8, 40, 41, 86, 87, 88, 90, 91, 120, 200, 236):
        begun = whole[:characters]
        before = characters // 4
        rest, rest_reason, rest_tokens = await answered(worker, path, begun, max_tokens=60 - before)
        assert begun + rest == whole
        assert (rest_reason, before + rest_tokens) == (reason, tokens)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_that_ends_by_itself_ends_at_the_same_place(worker: Worker, path: str) -> None:
    whole, reason, _ = await answered(worker, path, "")
    rest, rest_reason, _ = await answered(worker, path, whole[:101])
    assert (whole[:101] + rest, rest_reason) == (whole, reason)


@pytest.mark.parametrize("characters", [4, 19, 20, 21, 22, 23])
async def test_a_stop_text_after_the_seam_ends_the_answer(worker: Worker, characters: int) -> None:
    whole, reason, _ = await answered(worker, CHAT, "", stop="engine", max_tokens=60)
    rest, rest_reason, _ = await answered(worker, CHAT, whole[:characters], stop="engine", max_tokens=50)
    assert (whole[:characters] + rest, rest_reason) == (whole, reason)


async def test_a_prompt_that_only_quotes_an_answer_begins_a_new_one(worker: Worker) -> None:
    earlier, _, _ = await answered(worker, COMPLETIONS, "", max_tokens=30)
    again, _, _ = await answered(worker, COMPLETIONS, earlier + "\nAnd why is that? ", max_tokens=30)
    assert again[:50] == earlier[:50]
