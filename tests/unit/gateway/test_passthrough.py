"""Images and sounds are no text, addresses are found, and paths of an engine are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynaplan.engines.api_rules import EngineApi, integer
from dynaplan.gateway.openai_api import (
    API_PATHS,
    CHAT_COMPLETIONS,
    COMPLETIONS,
    MAX_TEXTS,
    ApiError,
    Call,
    check_context,
    check_fields,
    check_media,
    parse_call,
)
from dynaplan.gateway.passthrough import survey

IMAGE = {
    "type": "image_url",
    "image_url": {"url": "data:image/png;base64," + "A" * 1_400_000},
}
WEB = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/admin"}}


def call(path: str, **body: Any) -> Call:
    return parse_call(API_PATHS[path], json.dumps({"model": "m", **body}).encode())


def chat(*parts: dict[str, Any], text: str = "What is this?") -> Call:
    content = [{"type": "text", "text": text}, *parts]
    return call(CHAT_COMPLETIONS.path, messages=[{"role": "user", "content": content}])


def test_an_image_of_a_megabyte_counts_as_a_few_tokens_and_another_one_is_another_prompt() -> None:
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}
    assert chat(IMAGE).prompt_tokens < 40
    assert chat(IMAGE).has_media and not chat().has_media
    assert chat(IMAGE).prompt == chat(IMAGE).prompt != chat(other).prompt


@pytest.mark.parametrize(
    "part",
    [
        WEB,
        {"type": "image_url", "image_url": "HTTPS://example.com/x.png"},
        {"type": "audio_url", "audio_url": {"url": "https://example.com/x.wav"}},
        {
            "type": "image",
            "source": {"type": "url", "url": "https://example.com/x.png"},
        },
    ],
)
def test_an_address_that_an_engine_would_fetch_is_refused_unless_that_is_allowed(
    part: dict[str, Any],
) -> None:
    with pytest.raises(ApiError, match="would be fetched by the engine") as refusal:
        check_media(chat(part).address, allows_urls=False)
    assert "--Frontend.allow-media-urls=true" in str(refusal.value)
    check_media(chat(part).address, allows_urls=True)


@pytest.mark.parametrize("address", ["file:///etc/passwd", "/etc/passwd", "", "gopher://x"])
def test_files_and_other_schemes_are_never_fetched(address: str) -> None:
    with pytest.raises(ApiError, match="would be fetched"):
        check_media(chat({"type": "image_url", "image_url": {"url": address}}).address, allows_urls=True)


def test_data_is_no_address() -> None:
    check_media(chat(IMAGE).address, allows_urls=False)
    sound = {
        "type": "input_audio",
        "input_audio": {"data": "UklGR" * 1000, "format": "wav"},
    }
    check_media(chat(sound).address, allows_urls=False)
    assert chat(sound).prompt_tokens < 40


def test_an_engines_own_numbers_are_not_taken_from_clients() -> None:
    with pytest.raises(ApiError, match="'image_embeds' are not taken"):
        chat({"type": "image_embeds", "image_embeds": "AAAA"})


@pytest.mark.parametrize("part", ["text", {"text": "no type"}, {"type": "text"}, {"type": ["text"]}, 7])
def test_a_part_that_is_none_is_refused(part: Any) -> None:
    with pytest.raises(ApiError, match="part"):
        call(CHAT_COMPLETIONS.path, messages=[{"role": "user", "content": [part]}])


def test_several_prompts_are_one_request_whose_tokens_are_added_up() -> None:
    texts = call(COMPLETIONS.path, prompt=["abcd" * 10, "abcd" * 5])
    assert (texts.prompts, texts.prompt_tokens, texts.prompt) == (2, 15, "abcd" * 10)
    ids = call(COMPLETIONS.path, prompt=[[1, 2, 3], [4]])
    assert (ids.prompts, ids.prompt_tokens, ids.prompt) == (2, 4, (1, 2, 3))
    for wrong in (["a", ""], [["x"]], ["a", 7], []):
        with pytest.raises(ApiError, match="'prompt' must be"):
            call(COMPLETIONS.path, prompt=wrong)


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/v1/embeddings", {"input": ["abcd" * 4, "abcd"]}, 5),
        ("/v1/embeddings", {"input": [1, 2, 3]}, 3),
        ("/v1/rerank", {"query": "abcd", "documents": ["abcd", {"text": "abcd"}]}, 3),
        ("/v1/score", {"text_1": "abcd", "text_2": ["abcd"]}, 2),
        ("/v1/responses", {"instructions": "abcd", "input": "abcd"}, 2),
        (
            "/v1/responses",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [{"type": "input_text", "text": "abcd"}],
                    }
                ]
            },
            1,
        ),
        (
            "/v1/messages",
            {"system": "abcd", "messages": [{"role": "user", "content": "abcd"}]},
            2,
        ),
        ("/tokenize", {"prompt": "abcd"}, 0),
        ("/detokenize", {"tokens": [1, 2]}, 0),
    ],
)
def test_other_paths_are_read_for_their_tokens_and_never_computed_elsewhere(
    path: str, body: dict[str, Any], tokens: int
) -> None:
    passed = call(path, **body)
    assert passed.prompt_tokens == tokens
    assert not passed.can_be_remote


def test_only_one_prompt_of_text_is_computed_by_another_worker() -> None:
    assert chat().can_be_remote
    assert not chat(IMAGE).can_be_remote
    assert not call(COMPLETIONS.path, prompt=["a", "b"]).can_be_remote


def test_the_fields_of_another_path_have_rules_of_their_own_and_a_path_without_any_those_of_a_chat() -> None:
    known = EngineApi({"n": integer(1, 2)}, paths={"/v1/embeddings": {"dimensions": integer(1, 9)}})
    check_fields(call("/v1/embeddings", input="x", n=5, inputs="y"), known)
    with pytest.raises(ApiError, match="dimensions"):
        check_fields(call("/v1/embeddings", input="x", dimensions=10), known)
    check_fields(call("/v1/rerank", query="x"), known)
    with pytest.raises(ApiError, match="'n'"):
        check_fields(call("/v1/rerank", query="x", n=5), known)


def test_what_was_said_before_begins_the_text_by_which_a_passed_request_is_routed() -> None:
    first = call("/v1/responses", instructions="Be short.", input=[{"role": "user", "content": "Why?"}])
    second = call(
        "/v1/responses",
        instructions="Be short.",
        input=[{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}],
    )
    assert first.prompt_text == "Be short.Why?"
    assert second.prompt_text == "Be short.Why?So."


def test_only_paths_that_generate_are_streams() -> None:
    assert not call("/v1/embeddings", input="x", stream=True).is_stream
    assert call("/v1/responses", input="x", stream=True).is_stream


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/completions", "prompt"), ("/v1/embeddings", "input"), ("/v1/rerank", "documents")],
)
def test_the_number_of_texts_in_a_request_is_bounded_not_that_of_token_ids(path: str, field: str) -> None:
    call(path, **{field: ["a"] * MAX_TEXTS})
    call(path, **{field: [1] * (MAX_TEXTS + 1)})
    with pytest.raises(ApiError, match="2049 entries; at most 2048"):
        call(path, **{field: ["a"] * (MAX_TEXTS + 1)})


def test_each_of_several_prompts_has_the_context_for_itself() -> None:
    several = call(COMPLETIONS.path, prompt=["abcd" * 10, "abcd" * 10])
    check_context(several, 15)
    check_context(call("/v1/embeddings", input=["abcd" * 10] * 2), 15)
    with pytest.raises(ApiError, match="maximum context length"):
        check_context(call(COMPLETIONS.path, prompt="abcd" * 20), 15)


def test_an_address_that_was_told_to_the_client_is_none_for_the_engine() -> None:
    cited = {"type": "url_citation", "url": "https://example.com/", "title": "x"}
    part = {"type": "output_text", "text": "abcd", "annotations": [cited]}
    answer = {"type": "message", "role": "assistant", "content": [part]}
    assert call("/v1/responses", input=[answer]).address == ""


def test_a_deep_request_is_looked_through_without_recursion() -> None:
    deep: Any = {"type": "image_url", "image_url": "http://x/"}
    for _ in range(5_000):
        deep = [deep, True, None]
    assert survey([deep]).address == "http://x/"


def test_a_part_that_is_nested_too_deep_is_refused() -> None:
    part = '{"type": "image", "x": ' + "[" * 900 + "]" * 900 + "}"
    body = '{"model": "m", "messages": [{"role": "user", "content": [' + part + "]}]}"
    try:
        parse_call(CHAT_COMPLETIONS, body.encode())
    except ApiError as error:
        assert error.status == 400
