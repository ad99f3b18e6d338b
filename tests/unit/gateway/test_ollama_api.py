from __future__ import annotations

import json
import zlib
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.engines.model_facts import ModelFacts
from dynaplan.gateway.ollama_api import (
    MAX_CONTEXT_BYTES,
    OllamaAnswer,
    OllamaModel,
    Translation,
    chat_request,
    cut_texts,
    embed_request,
    embeddings_of_one,
    generate_request,
    keep_alive_s,
    load_answer,
    ps_document,
    read_context,
    show_document,
    tags_document,
)
from dynaplan.gateway.openai_api import ApiError
from tests.attack.fuzzing import mutated, total

HELLO = [{"role": "user", "content": "hello"}]


def chat(**changes: Any) -> Translation:
    return chat_request({"model": "qwen", "messages": HELLO, **changes})


def test_a_chat_is_a_chat_completion_with_a_stream_unless_it_says_no() -> None:
    assert chat() == Translation(
        "qwen",
        "/v1/chat/completions",
        {"model": "qwen", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}},
    )
    whole = chat(stream=False)
    assert whole.body == {"model": "qwen", "messages": HELLO, "stream": False}
    assert not whole.is_streamed


def test_options_of_sampling_are_passed_on_and_those_of_a_load_are_the_owners() -> None:
    options = {"temperature": 0, "top_k": 5, "num_predict": 9, "stop": ["x"], "num_ctx": 4096, "seed": None}
    body = chat(options=options).body
    assert {key: body[key] for key in body.keys() - {"model", "messages", "stream", "stream_options"}} == {
        "temperature": 0,
        "top_k": 5,
        "max_tokens": 9,
        "stop": ["x"],
    }
    assert "max_tokens" not in chat(options={"num_predict": -1}).body


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"format": "json"}, {"response_format": {"type": "json_object"}}),
        (
            {"format": {"type": "object"}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                }
            },
        ),
        ({"think": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"think": "high"}, {"reasoning_effort": "high"}),
        ({"tools": [{"type": "function"}]}, {"tools": [{"type": "function"}]}),
    ],
)
def test_formats_thinking_and_tools_are_in_openais_form(fields: Any, expected: Any) -> None:
    assert chat(**fields).body.items() >= expected.items()


def test_images_become_parts_of_a_message() -> None:
    message = {"role": "user", "content": "what?", "images": ["iVBORw0KGgo=", "/9j/4AAQ"]}
    (translated,) = chat(messages=[message]).body["messages"]
    assert translated["content"] == [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9j/4AAQ"}},
    ]


def test_calls_of_tools_get_ids_by_which_their_results_find_them() -> None:
    def call(name: str, city: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"city": city}}}

    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call("weather", "Rome"), call("time", "Rome")]},
        {"role": "tool", "tool_name": "time", "content": "noon"},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "nobody asked", "tool_call_id": "own"},
    ]
    translated = chat(messages=messages).body["messages"]
    assert translated[1]["tool_calls"][0] == {
        "id": "call_1_0",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    assert [each.get("tool_call_id") for each in translated[2:]] == ["call_1_1", "call_1_0", "own"]


def test_a_prompt_is_a_chat_and_a_raw_one_or_one_with_a_suffix_a_completion() -> None:
    asked = generate_request({"model": "m", "prompt": "hi", "system": "be brief", "stream": False})
    assert (asked.path, asked.is_chat) == ("/v1/chat/completions", False)
    assert asked.body["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    raw = generate_request({"model": "m", "prompt": "def f(", "suffix": "return", "stream": False})
    assert raw.path == "/v1/completions"
    assert raw.body == {"model": "m", "stream": False, "prompt": "def f(", "suffix": "return"}
    assert generate_request({"model": "m", "prompt": "x", "raw": True}).path == "/v1/completions"


def test_embeddings_are_asked_by_both_paths() -> None:
    asked = embed_request({"model": "e5", "input": ["a", "b"], "dimensions": 8})
    assert asked.body == {"model": "e5", "input": ["a", "b"], "dimensions": 8}
    assert embed_request({"model": "e5", "prompt": "a"}).body == {"model": "e5", "input": "a"}


@pytest.mark.parametrize(
    "asked",
    [
        chat_request({"model": "m", "messages": []}),
        generate_request({"model": "m"}),
        embed_request({"model": "m", "input": []}),
    ],
)
def test_a_request_without_a_prompt_only_loads(asked: Translation) -> None:
    assert (asked.path, asked.is_unload) == ("", False)


def test_a_load_and_an_unload_are_answered_in_one_line() -> None:
    load = chat_request({"model": "m"})
    assert load_answer(load, "/api/chat", 0.0) == {
        "model": "m",
        "created_at": "1970-01-01T00:00:00Z",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "load",
    }
    unload = generate_request({"model": "m", "keep_alive": 0})
    assert load_answer(unload, "/api/generate", 0.5)["done_reason"] == "unload"
    assert load_answer(unload, "/api/generate", 0.5)["response"] == ""


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"model": "m", "messages": "x"},
        {"model": "m", "messages": ["x"]},
        {"model": "m", "messages": [{"tool_calls": ["x"]}]},
        {"model": "m", "messages": [{"images": [5]}]},
        {"model": "m", "messages": HELLO, "options": 5},
        {"model": "m", "messages": HELLO, "keep_alive": "soon"},
    ],
)
def test_what_cannot_be_translated_is_an_error(document: dict[str, Any]) -> None:
    with pytest.raises(ApiError):
        chat_request(document)


def test_a_prompt_that_is_no_text_is_an_error() -> None:
    with pytest.raises(ApiError, match="prompt is no text"):
        generate_request({"model": "m", "prompt": 5})


CALL = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
COMMON = {
    "model": "m",
    "stream": False,
    "keep_alive": "5m",
    "options": {"temperature": 0.5, "num_predict": 9, "stop": ["x"]},
    "format": {"type": "object"},
    "think": True,
}
REQUESTS: list[tuple[Any, dict[str, Any]]] = [
    (
        chat_request,
        {
            **COMMON,
            "messages": [
                {"role": "user", "content": "hi", "images": ["iVBORw0KGgo="]},
                {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
                {"role": "tool", "tool_name": "weather", "content": "sunny"},
                {"role": "tool", "tool_call_id": "own", "content": "noon"},
            ],
            "tools": [{"type": "function"}],
        },
    ),
    (generate_request, {**COMMON, "prompt": "hi", "system": "be brief", "images": ["iVBORw0KGgo="]}),
    (generate_request, {**COMMON, "prompt": "hi", "raw": True, "suffix": "end"}),
    (embed_request, {"model": "m", "keep_alive": 5, "input": ["a"], "prompt": "a", "dimensions": 8}),
]


@pytest.mark.parametrize(("translate", "real"), REQUESTS)
@total
@given(data=st.data())
def test_a_field_of_any_type_is_translated_or_refused(
    translate: Any, real: dict[str, Any], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(real)))
    try:
        asked = translate({**real, name: mutated(real[name], data.draw)})
    except ApiError as refused:
        assert len(str(refused)) < 300
    else:
        assert json.dumps(asked.body)


@pytest.mark.parametrize("name", ["images", "tool_calls"])
@pytest.mark.parametrize("value", [5, "iVBORw0KGgo=", {"a": "b"}])
def test_a_list_in_a_message_is_a_list(name: str, value: Any) -> None:
    with pytest.raises(ApiError, match=f"{name} is no list"):
        chat(messages=[{"role": "user", "content": "hi", name: value}])


# Leases


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("", None),
        (0, 0),
        (300, 300),
        (-1, inf),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("500ms", 0.5),
        ("-1", inf),
        ("-1m", inf),
        ("0", 0),
        ("90", 90),
    ],
)
def test_a_keep_alive_is_a_number_or_a_duration(value: Any, seconds: float | None) -> None:
    assert keep_alive_s(value) == seconds


@pytest.mark.parametrize("value", ["5 m", "m", "5x", True, [], "5m!", 10**400, "1h" * 33, "9" * 10**5 + "x"])
def test_another_keep_alive_is_an_error(value: Any) -> None:
    with pytest.raises(ApiError, match="keep_alive is") as refused:
        keep_alive_s(value)
    assert len(str(refused.value)) < 200


# Answers


def answer(asked: Translation | None = None) -> OllamaAnswer:
    return OllamaAnswer(asked or chat(), arrived_s=10.0, admitted_s=12.0, unix_offset_s=-10.0)


def delta(**changes: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": changes}]}


def lines(*parts: bytes) -> list[Any]:
    return [json.loads(each) for each in b"".join(parts).splitlines()]


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
COUNTS = {
    "done": True,
    "done_reason": "stop",
    "total_duration": 5_000_000_000,
    "load_duration": 2_000_000_000,
    "prompt_eval_count": 7,
    "prompt_eval_duration": 1_000_000_000,
    "eval_count": 2,
    "eval_duration": 2_000_000_000,
}


def test_a_stream_becomes_lines_and_the_last_has_counts_and_durations() -> None:
    own = answer()
    told = lines(
        own.on_event(delta(role="assistant"), 12.5),
        own.on_event(delta(content="He"), 13.0),
        own.on_event(delta(content="llo"), 14.0),
        own.on_event({"choices": [{"delta": {}, "finish_reason": "stop"}]}, 14.5),
        own.on_event(USAGE, 14.5),
        own.on_end(15.0),
    )
    assert told == [
        {
            "model": "qwen",
            "created_at": "1970-01-01T00:00:03Z",
            "message": {"role": "assistant", "content": "He"},
            "done": False,
        },
        {
            "model": "qwen",
            "created_at": "1970-01-01T00:00:04Z",
            "message": {"role": "assistant", "content": "llo"},
            "done": False,
        },
        {
            "model": "qwen",
            "created_at": "1970-01-01T00:00:05Z",
            "message": {"role": "assistant", "content": ""},
            **COUNTS,
        },
    ]


def test_thinking_is_told_apart_from_the_answer() -> None:
    (told,) = lines(answer().on_event(delta(reasoning_content="hm"), 13.0))
    assert told["message"] == {"role": "assistant", "content": "", "thinking": "hm"}


def test_calls_of_tools_come_whole_with_objects_as_arguments() -> None:
    own = answer()
    for index, name, arguments in ((0, "weather", '{"ci'), (1, "time", ""), (0, None, 'ty": "Rome"}')):
        call = {"index": index, "function": {"name": name, "arguments": arguments}}
        assert own.on_event(delta(tool_calls=[call]), 13.0) == b""
    called, end = lines(own.on_end(15.0))
    assert called["message"]["tool_calls"] == [
        {"function": {"name": "weather", "arguments": {"city": "Rome"}}},
        {"function": {"name": "time", "arguments": {}}},
    ]
    assert (called["done"], end["done"]) == (False, True)


def test_a_generation_has_its_text_in_response() -> None:
    own = answer(generate_request({"model": "m", "prompt": "x", "raw": True}))
    told = lines(
        own.on_event({"choices": [{"text": "y", "finish_reason": "length"}]}, 13.0), own.on_end(13.0)
    )
    assert [each["response"] for each in told] == ["y", ""]
    assert told[1]["done_reason"] == "length"


def test_a_whole_answer_is_one_document() -> None:
    call = {"function": {"name": "weather", "arguments": "no JSON"}}
    choice = {"message": {"content": "hello", "tool_calls": [call]}, "finish_reason": "tool_calls"}
    own = answer(chat(stream=False))
    told = own.on_document({"choices": [choice], "usage": USAGE["usage"]}, 15.0)
    assert told["message"] == {
        "role": "assistant",
        "content": "hello",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"arguments": "no JSON"}}}],
    }
    assert (told["done_reason"], told["prompt_eval_duration"], told["eval_count"]) == (
        "stop",
        3_000_000_000,
        2,
    )


def test_a_whole_generation_is_one_document() -> None:
    own = answer(generate_request({"model": "m", "prompt": "x", "stream": False}))
    told = own.on_document({"choices": [{"message": {"content": "y", "reasoning": "hm"}}]}, 15.0)
    assert (told["response"], told["thinking"], told["done"]) == ("y", "hm", True)


def test_embeddings_are_answered_to_both_paths() -> None:
    own = answer(embed_request({"model": "e5", "input": "a"}))
    document = {"data": [{"embedding": [1.0, 2.0]}], "usage": {"prompt_tokens": 3}}
    told = own.on_embeddings(document, 15.0)
    assert told == {
        "model": "e5",
        "embeddings": [[1.0, 2.0]],
        "total_duration": 5_000_000_000,
        "load_duration": 2_000_000_000,
        "prompt_eval_count": 3,
    }
    assert embeddings_of_one(told) == {"embedding": [1.0, 2.0]}


def test_a_failure_in_a_stream_is_a_line_with_the_error() -> None:
    assert lines(answer().on_failure("the model could not be loaded")) == [
        {"error": "the model could not be loaded"}
    ]


# Conversations, and texts that are too long


def test_a_generation_goes_on_by_the_context_of_the_one_before() -> None:
    own = answer(
        generate_request({"model": "m", "system": "be short", "prompt": "I am Ada", "stream": False})
    )
    told = own.on_document({"choices": [{"message": {"content": "Hello"}}]}, 15.0)
    assert all(isinstance(each, int) for each in told["context"])
    following = generate_request({"model": "m", "prompt": "Who am I?", "context": told["context"]})
    assert [(each["role"], each["content"]) for each in following.body["messages"]] == [
        ("system", "be short"),
        ("user", "I am Ada"),
        ("assistant", "Hello"),
        ("user", "Who am I?"),
    ]


def test_a_streamed_generation_ends_with_its_context_and_a_raw_one_has_none() -> None:
    own = answer(generate_request({"model": "m", "prompt": "I am Ada"}))
    own.on_event({"choices": [{"delta": {"content": "Hel"}}]}, 14.0)
    own.on_event({"choices": [{"delta": {"content": "lo"}}]}, 15.0)
    assert read_context(lines(own.on_end(16.0))[-1]["context"])[-1] == {
        "role": "assistant",
        "content": "Hello",
    }
    raw = answer(generate_request({"model": "m", "prompt": "x", "raw": True}))
    assert "context" not in lines(raw.on_end(16.0))[-1]
    assert "context" not in lines(answer().on_end(16.0))[-1]


@pytest.mark.parametrize(
    "numbers", [[1, 2, 3], [300], ["a"], "text", {"a": 1}, 5, -1, list(zlib.compress(b"[1]"))]
)
def test_a_context_of_another_service_is_refused(numbers: Any) -> None:
    with pytest.raises(ApiError, match="context"):
        generate_request({"model": "m", "prompt": "x", "context": numbers})


def test_a_context_unpacks_to_a_bounded_length() -> None:
    bomb = list(zlib.compress(b"[" + b" " * 10 * MAX_CONTEXT_BYTES + b"]"))
    with pytest.raises(ApiError, match="context"):
        generate_request({"model": "m", "prompt": "x", "context": bomb})


@pytest.mark.parametrize(
    ("fault", "kept"),
    [("input (200 tokens) is too large to process (current batch size: 100)", 47), ("too long", 50)],
)
def test_of_texts_that_are_too_long_the_beginnings_are_embedded(fault: str, kept: int) -> None:
    body = json.dumps({"model": "e", "input": ["a" * 100, "b"]}).encode()
    assert json.loads(cut_texts(body, fault))["input"] == ["a" * kept, "b"]
    one = json.loads(cut_texts(json.dumps({"input": "a" * 100}).encode(), fault))["input"]
    assert one == "a" * kept


def test_texts_are_cut_unless_the_request_says_no() -> None:
    assert embed_request({"model": "e", "input": "a"}).is_truncated
    assert not embed_request({"model": "e", "input": "a", "truncate": False}).is_truncated


# Models

DIGEST = "6837a34793dda9ffaded49e51891874d3fbe447e852a7ca0df74e08cdada45bf"
FACTS = ModelFacts(
    DIGEST,
    7,
    60.0,
    "gguf",
    "qwen2",
    134_515_008,
    "Q4_K_M",
    "{{ messages }}",
    ("completion", "tools"),
    {"qwen2.block_count": 30, "qwen2.heads": (8, 8), "qwen2.scale": inf},
)
MODEL = OllamaModel("qwen", FACTS, 4, True, 4096, 60.0)
DETAILS = {
    "parent_model": "",
    "format": "gguf",
    "family": "qwen2",
    "families": ["qwen2"],
    "parameter_size": "134.52M",
    "quantization_level": "Q4_K_M",
}


def test_models_are_listed_with_a_tag_and_what_their_files_tell() -> None:
    listed, bare = tags_document([MODEL, OllamaModel("a:1", ModelFacts(DIGEST))])["models"]
    assert listed == {
        "name": "qwen:latest",
        "model": "qwen:latest",
        "size": 7,
        "digest": DIGEST,
        "modified_at": "1970-01-01T00:01:00Z",
        "details": DETAILS,
    }
    assert (bare["name"], bare["details"]["families"]) == ("a:1", [])


def test_loaded_models_are_listed_with_the_moment_at_which_they_leave() -> None:
    leaves, stays = ps_document([MODEL, OllamaModel("a", FACTS, 9)])["models"]
    assert (leaves["expires_at"], leaves["context_length"]) == ("1970-01-01T00:01:00Z", 4096)
    assert (stays["expires_at"], stays["digest"]) == ("9999-12-31T23:59:59Z", DIGEST)


def test_a_loaded_model_is_no_smaller_than_its_file_whatever_has_been_measured_yet() -> None:
    on_gpu, on_cpu = ps_document([MODEL, OllamaModel("a", FACTS, 9)])["models"]
    assert (on_gpu["size"], on_gpu["size_vram"]) == (7, 7)
    assert (on_cpu["size"], on_cpu["size_vram"]) == (9, 0)


def test_a_model_that_leaves_later_than_a_date_can_tell_never_leaves() -> None:
    (told,) = ps_document([OllamaModel("a", FACTS, expires_unix_s=1e12)])["models"]
    assert told["expires_at"] == "9999-12-31T23:59:59Z"


@pytest.mark.parametrize(
    ("parameters", "told"), [(0, ""), (7, "7"), (22_713_216, "22.71M"), (8_030_261_312, "8.0B"), (5200, "5K")]
)
def test_a_number_of_parameters_is_written_as_ollama_writes_it(parameters: int, told: str) -> None:
    shown = show_document(OllamaModel("a", ModelFacts(DIGEST, parameters=parameters)))
    assert shown["details"]["parameter_size"] == told


def test_a_model_is_shown_with_its_context_capabilities_and_the_keys_of_its_file() -> None:
    shown = show_document(MODEL)
    assert shown["model_info"] == {
        "general.architecture": "qwen2",
        "general.parameter_count": 134_515_008,
        "qwen2.context_length": 4096,
        "qwen2.block_count": 30,
        "qwen2.heads": None,
        "qwen2.scale": None,
    }
    assert (shown["capabilities"], shown["details"]) == (["completion", "tools"], DETAILS)
    assert (shown["template"], shown["parameters"].split()) == ("{{ messages }}", ["num_ctx", "4096"])
    assert show_document(MODEL, is_verbose=True)["model_info"]["qwen2.heads"] == (8, 8)
    bare = show_document(OllamaModel("a", ModelFacts(DIGEST)))
    assert bare["model_info"] == {"general.architecture": "unknown"}
