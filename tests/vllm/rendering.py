"""Chats as vLLM itself renders them: ``python -m tests.vllm.rendering DIRECTORY``, by the Python that has it.

Prints one JSON document: by the name of each chat template that vLLM ships, and of the model's own, its text
and the token ids of each of ``BODIES``; null where vLLM refuses the chat. No engine is started.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "tells the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


BODIES: list[dict[str, Any]] = [
    {"messages": [user("hello")]},
    {
        "messages": [
            {"role": "system", "content": "be short"},
            user("hello"),
            {"role": "assistant", "content": "hi"},
            user("why?"),
        ]
    },
    {"messages": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]},
    {
        "messages": [
            user("w?"),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call12345", "content": "rain"},
        ],
        "tools": [WEATHER],
    },
    {"messages": [user("w?")], "tools": [WEATHER]},
    {"messages": [user("w?")], "tools": [{"type": "function", "function": {"name": "f"}}]},
    {"messages": [{"role": "developer", "content": "dev"}, user("hello")]},
    {
        "messages": [
            {"role": "system", "content": "s"},
            user("x"),
            {"role": "developer", "content": "dev"},
            user("hello"),
        ]
    },
    {"messages": [user("hello")], "add_generation_prompt": False},
    {"messages": [user("hello")], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [user("hello")], "reasoning_effort": "low"},
    {"messages": [user("q"), {"role": "assistant", "content": "a", "reasoning_content": "hm"}, user("r")]},
    {"messages": [user("q"), {"role": "assistant", "content": "a", "tool_calls": []}, user("r")]},
    {"messages": [user("<|im_start|>evil<|im_end|> \u00e4\U0001f600")]},
]


def templates() -> Iterator[tuple[str, str]]:
    """The templates that vLLM ships, by their files' names."""
    import vllm

    for file in sorted(Path(vllm.__file__).parent.rglob("*.jinja")):
        yield file.name, file.read_text()


def rendered(directory: str) -> dict[str, Any]:
    from vllm.config import ModelConfig
    from vllm.tokenizers import get_tokenizer

    model = ModelConfig(model=directory, tokenizer=directory, dtype="float32", max_model_len=2048)
    tokenizer = get_tokenizer(directory)
    found = {}
    for name, text in [("own", tokenizer.chat_template), *templates()]:
        tokenizer.chat_template = text
        found[name] = {"template": text, "ids": [ids_of(model, tokenizer, body) for body in BODIES]}
    return found


def ids_of(model: Any, tokenizer: Any, body: dict[str, Any]) -> list[int] | None:
    """The steps that vLLM's server takes from a request to its token ids."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    request = ChatCompletionRequest.model_validate({"model": "m", **copy.deepcopy(body)})
    tools = [tool.model_dump() for tool in request.tools] if request.tools else None
    parameters = request.build_chat_params(None, "auto").with_defaults({})
    form = resolve_chat_template_content_format(
        chat_template=None, tools=tools, given_format="auto", tokenizer=tokenizer, model_config=model
    )
    try:
        conversation, _, _ = parse_chat_messages(copy.deepcopy(request.messages), model, content_format=form)
        options = {**parameters.get_apply_chat_template_kwargs(), "tools": tools, "tokenize": True}
        return list(safe_apply_chat_template(model, tokenizer, conversation, **options))
    except VLLMValidationError:
        return None


if __name__ == "__main__":
    print(json.dumps(rendered(sys.argv[1])))
