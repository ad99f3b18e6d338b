"""The text of a chat, as engines make it of the model's template. The expected texts are vLLM's rules."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from dynaplan.gateway.kv_routing.chat_templates import ChatTemplates, Unrenderable
from dynaplan.gateway.kv_routing.tokenizer_files import ChatFiles
from tests.fakes.tokenizers import CHATML

HELLO = {"role": "user", "content": "hello"}


def text(
    template: str, *messages: dict[str, Any], specials: dict[str, Any] | None = None, **body: Any
) -> str:
    files = ChatFiles({"default": template}, specials or {})
    return ChatTemplates(files).text({"messages": list(messages) or [HELLO], **body})


def test_a_chat_is_its_turns_and_the_beginning_of_the_answer() -> None:
    turns = ({"role": "system", "content": "be short"}, HELLO)
    whole = "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
    assert text(CHATML, *turns) == whole + "<|im_start|>assistant\n"
    assert text(CHATML, *turns, add_generation_prompt=False) == whole


def test_text_parts_are_joined_by_lines_unless_the_template_goes_through_them() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]}
    assert text("{{ messages[0].content }}", parts) == "a\nb\nc"
    through = "{% for m in messages %}{% for p in m['content'] %}[{{ p['text'] }}]{% endfor %}{% endfor %}"
    assert text(through, parts, HELLO) == "[a][b][c][hello]"
    renamed = (
        "{% set turns = messages[1:] %}{% for m in turns | list %}"
        "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    )
    assert text(renamed, HELLO, parts) == "[a][b][c]"


def test_what_is_no_text_is_left_to_the_engine() -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}
    with pytest.raises(Unrenderable, match="is no text"):
        text(CHATML, picture)


def test_a_message_without_content_has_an_empty_one() -> None:
    assert text("[{{ messages[0].content }}]", {"role": "assistant", "content": None}) == "[]"


def test_tools_have_all_of_openais_fields_in_their_order() -> None:
    tool = {"type": "function", "function": {"description": "the weather", "name": "weather", "strict": True}}
    assert text("{{ tools[0] | tojson }}{{ tools | length }}", tools=[tool]) == (
        '{"type": "function", "function": {"name": "weather", "description": "the weather", '
        '"parameters": null, "strict": true}}1'
    )
    assert text("{{ tools }}") == "None"


def test_a_template_for_tools_is_used_where_there_are_tools() -> None:
    files = ChatFiles({"default": "plain", "tool_use": "with tools"})
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert ChatTemplates(files).text({"messages": [HELLO]}) == "plain"
    assert ChatTemplates(files).text({"messages": [HELLO], "tools": tools}) == "with tools"


def test_the_arguments_of_a_tool_call_are_read_and_its_answer_names_it() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    none = {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": ""}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call, none]}
    answer = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "rain"}
    assert (
        text(
            "{{ messages[0].tool_calls[0].function.arguments.city }} "
            "{{ messages[0].tool_calls[1].function.arguments }} "
            "{{ messages[1].tool_call_id }} {{ messages[1].name }}",
            asked,
            answer,
        )
        == "Ulm {} c1 weather"
    )


def test_a_reasoning_is_there_under_both_of_its_names() -> None:
    thought = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert text("{{ messages[0].reasoning }} {{ messages[0].reasoning_content }}", thought) == "hm hm"


def test_special_tokens_and_the_clients_arguments_have_names() -> None:
    template = "{{ bos_token }}{{ enable_thinking }}{{ eos_token is defined }}"
    arguments = {"enable_thinking": False}
    assert text(template, specials={"bos_token": "<s>"}, chat_template_kwargs=arguments) == "<s>FalseFalse"


def test_json_is_written_as_it_is_and_not_for_html() -> None:
    assert text("{{ messages[0].content | tojson }}", {"role": "user", "content": "<\u00e4>"}) == '"<\u00e4>"'


def test_blocks_for_training_and_the_control_of_loops_have_their_meaning() -> None:
    marked = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    )
    assert text(marked, HELLO, HELLO) == "hello"
    assert text("{{ strftime_now('%Y') | length }}") == "4"


@pytest.mark.parametrize("field", ["chat_template", "continue_final_message", "truncate_prompt_tokens"])
def test_what_only_the_engine_does_is_left_to_it(field: str) -> None:
    with pytest.raises(Unrenderable, match=field):
        text(CHATML, **{field: True})


def test_a_model_without_a_template_and_a_template_that_is_none_are_named() -> None:
    with pytest.raises(Unrenderable, match="no chat template"):
        ChatTemplates(ChatFiles()).text({"messages": [HELLO]})
    with pytest.raises(Unrenderable, match="cannot be compiled"):
        ChatTemplates(ChatFiles({"default": "{% for %}"}))


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ messages.append(1) }}",
        "{{ range(10000000) | list | length }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_a_template_reaches_nothing_but_what_it_is_given(attack: str) -> None:
    with pytest.raises((SecurityError, OverflowError, TemplateError)):
        text(attack)


def test_a_template_may_refuse_a_chat() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        text("{{ raise_exception('roles must alternate') }}")


ROLES = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"


def test_a_developer_is_the_system_for_a_template_that_does_not_know_the_role() -> None:
    system, developer = ({"role": role, "content": role} for role in ("system", "developer"))
    assert text(ROLES, developer, HELLO) == "[system: developer][user: hello]"
    assert text(ROLES, system, HELLO, developer) == "[system: system\n\ndeveloper][user: hello]"
    known = ROLES + "{# 'developer' #}"
    assert text(known, developer, HELLO) == "[developer: developer][user: hello]"


def test_a_developers_parts_are_joined_where_messages_are_merged() -> None:
    through = "{% for m in messages %}{% for p in m.content %}{% endfor %}[{{ m.content }}]{% endfor %}"
    parts = {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert text(through, {"role": "system", "content": "s"}, parts) == "[s\n\na\nb]"


def test_an_effort_turns_thinking_on_unless_the_client_says_otherwise() -> None:
    template = "{{ reasoning_effort }} {{ enable_thinking }}"
    assert text(template, reasoning_effort="low") == "low True"
    assert text(template, reasoning_effort="none") == "none False"
    arguments = {"enable_thinking": False, "add_generation_prompt": False}
    assert text(template, reasoning_effort="low", chat_template_kwargs=arguments) == "low False"


@pytest.mark.parametrize("arguments", ["not json", "[1]", None, 5])
def test_arguments_of_a_call_that_are_no_object_are_empty(arguments: object) -> None:
    asked = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    assert text("{{ messages[0].tool_calls[0].function.arguments }}", asked) == "{}"


def test_no_calls_are_as_if_there_were_none_and_a_tools_answer_is_one_text() -> None:
    assert text("{{ messages[0].tool_calls is defined }}", {"role": "assistant", "tool_calls": []}) == "False"
    through = "{% for m in messages %}{% for p in m.content %}{% endfor %}{{ m.content }}{% endfor %}"
    parts = {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert text(through, parts) == "a\nb"
