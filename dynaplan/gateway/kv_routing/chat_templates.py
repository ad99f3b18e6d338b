"""The text of a chat, as a model's chat template makes it: the same that the model's engine makes.

A template is a program in Jinja that came with the model. It runs in a sandbox, which keeps it from Python's
objects, and only in the tokenizing process, which bounds its time and its memory.

Sources: ``apply_chat_template`` of the library ``transformers`` (the sandbox, filters, names), and vLLM 0.32
``entrypoints/chat_utils.py`` (the form in which a template sees messages and tools).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dynaplan.gateway.kv_routing.tokenizer_files import DEFAULT, WITH_TOOLS, ChatFiles

NOT_RENDERED = ("chat_template", "continue_final_message", "truncate_prompt_tokens", "mm_processor_kwargs")
"""Fields of a request by which engines render it in ways that are not followed here."""


DEVELOPER = re.compile(r"[\"']developer[\"']")
"""The mark of a template that knows messages of this role; for others they are the system's."""


class Unrenderable(Exception):
    """A chat whose text cannot be made here."""


class Generation(Extension):  # type: ignore[misc]  # jinja2's types are not read
    """``{% generation %}``, which marks an answer for training and has no effect on the text."""

    tags = {"generation"}  # noqa: RUF012  # declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        """Return what stands in the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        scope: nodes.Node = nodes.Scope(body).set_lineno(line)
        return scope


class ChatTemplates:
    """Renders chats with a model's templates; raises Unrenderable for a template that cannot be compiled."""

    def __init__(self, files: ChatFiles) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens = dict(files.special_tokens)
        try:
            self._templates = {name: environment.from_string(text) for name, text in files.templates.items()}
            self._wants_parts = {
                name: wants_parts(environment.parse(text)) for name, text in files.templates.items()
            }
            self._for_developers = {name for name, text in files.templates.items() if DEVELOPER.search(text)}
        except (TemplateError, RecursionError) as error:
            raise Unrenderable(f"the chat template cannot be compiled: {error}") from error

    def text(self, body: Mapping[str, Any]) -> str:
        """Return the text of a chat completion's body; raises Unrenderable, and what a template raises."""
        if odd := sorted(name for name in NOT_RENDERED if body.get(name)):
            raise Unrenderable(f"{odd[0]!r} is the engine's own affair")
        tools = body.get("tools") or None
        name = WITH_TOOLS if tools and WITH_TOOLS in self._templates else DEFAULT
        if name not in self._templates:
            raise Unrenderable("the model has no chat template")
        messages = [_message(each, has_parts=self._wants_parts[name]) for each in body["messages"]]
        if name not in self._for_developers:
            messages = _without_developers(messages)
        text: str = self._templates[name].render(
            {
                **self._special_tokens,
                **_arguments(body),
                "messages": messages,
                "tools": tools and [_tool(each) for each in tools],
                "documents": body.get("documents"),
                "add_generation_prompt": body.get("add_generation_prompt", True),
            }
        )
        return text


def _arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the client's own arguments of the template, and the effort, which may turn thinking on."""
    given = body.get("chat_template_kwargs")
    arguments = dict(given) if isinstance(given, dict) else {}
    if (effort := body.get("reasoning_effort")) is not None:
        arguments = {"enable_thinking": effort != "none", **arguments, "reasoning_effort": effort}
    return arguments


def _without_developers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with those of developers in the one of the system, which comes first."""
    if not any(each["role"] == "developer" for each in messages):
        return messages
    instructions = [each for each in messages if each["role"] in ("developer", "system")]
    if instructions == messages[:1]:
        return [{**instructions[0], "role": "system"}, *messages[1:]]
    texts = [_join(each["content"]) for each in instructions]
    others = [each for each in messages if each["role"] not in ("developer", "system")]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _join(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(each["text"] for each in content)


def _message(message: Mapping[str, Any], *, has_parts: bool) -> dict[str, Any]:
    """Return a message as a template sees it: its texts as one, or each as a part."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else list(content or ())
    texts = [_part_text(each) for each in parts]
    seen: dict[str, Any] = {"role": message["role"]}
    has_parts = has_parts and message["role"] != "tool"
    seen["content"] = [{"type": "text", "text": each} for each in texts] if has_parts else "\n".join(texts)
    if message["role"] == "assistant":
        if message.get("tool_calls"):
            seen["tool_calls"] = [_tool_call(each) for each in message["tool_calls"]]
        if reasoning := message.get("reasoning") or message.get("reasoning_content"):
            seen |= {"reasoning": reasoning, "reasoning_content": reasoning}
    elif message["role"] == "tool" and "tool_call_id" in message:
        seen["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        seen["name"] = message["name"]
    return seen


def _part_text(part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise Unrenderable("a part of the content is no text")
    return text


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments read, as templates expect them; empty if they are no object."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    function["arguments"] = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": function}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with all of OpenAI's fields, in their order; others follow."""
    function = {"name": None, "description": None, "parameters": None, **tool["function"]}
    return {"type": "function", **tool, "function": function}


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as ``transformers`` does: jinja2's own filter writes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)


def wants_parts(template: nodes.Template) -> bool:
    """Return whether a template goes through a message's content part by part: else it wants one text."""
    messages = set(_aliases(template, "messages"))
    turns = {target for names in messages for target in _loop_targets(template, names)}
    return any(_means(loop.iter, turn, "content") for loop in template.find_all(nodes.For) for turn in turns)


def _aliases(template: nodes.Template, name: str) -> Iterator[str]:
    """Yield the name and every variable to which it, or a part of it, is assigned."""
    waiting, seen = [name], {name}
    while waiting:
        name = waiting.pop()
        yield name
        for each in template.find_all(nodes.Assign):
            target = each.target.name if isinstance(each.target, nodes.Name) else name
            if target not in seen and _means(each.node, name):
                seen.add(target)
                waiting.append(target)


def _loop_targets(template: nodes.Template, name: str) -> Iterator[str]:
    for loop in template.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and _means(loop.iter, name):
            yield loop.target.name


def _means(node: nodes.Node | None, name: str, key: str = "") -> bool:
    """Tell whether an expression is that variable, or its field ``key``, filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _means(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _means(node.node, name, key)
    if not key:
        return isinstance(node, nodes.Name) and node.name == name
    if isinstance(node, nodes.Getitem):
        return _means(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _means(node.node, name) and node.attr == key
