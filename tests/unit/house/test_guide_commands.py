"""Every command of a guide can be typed as it stands: click takes it, and the readers of ours its YAML."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import click
import pytest
import yaml

from dynaplan.cli.main import group
from dynaplan.cli.service_options import FLAGS, ComponentCommand, ServiceOptionsCommand
from dynaplan.config.overrides import Sections, merge_sections, parse_overrides, split_overrides
from dynaplan.config.yaml_file import read_sections
from dynaplan.graph.config import find_config_file, read_config, validate_config
from dynaplan.graph.loading import load_graph
from dynaplan.util.errors import DynaplanError
from tests.guides.reading import commands, fenced, in_the_text, invocations
from tests.guides.walks import ELSEWHERE, WALKS
from tests.unit.house.source import GUIDES, REPOSITORY, short

README = REPOSITORY / "README.md"
WHOLE = [(document, command) for document in [README, *GUIDES] for command in commands(document)]
MENTIONED = [(document, command) for document in [README, *GUIDES] for command in in_the_text(document)]
PASSES_ON = {"compat", "worker", "systemd"}
"""Commands that pass on what they do not know: to a program, to an engine, to ``serve``."""


@pytest.fixture(autouse=True)
def the_environment_of_before() -> Iterator[None]:
    """Options such as ``--store`` are passed on as variables."""
    with patch.dict(os.environ):
        yield


def mistakes(arguments: list[str], *, is_whole: bool) -> Iterator[str]:
    """Yield what click would complain of; a command that is not whole may lack arguments."""
    context, command, rest = click.Context(group), group, arguments
    while isinstance(command, click.Group):
        if not rest or rest[0].startswith("-"):
            return
        _, found, rest = command.resolve_command(context, rest)
        assert found
        command = found
        context = click.Context(found, info_name=found.name, parent=context, **found.context_settings)
    if command.name in PASSES_ON:
        return
    if isinstance(command, ComponentCommand):
        command.parse_args(context, list(rest))
        yield from (f"no such option: {name}" for name in context.meta[FLAGS].others)
        return
    if isinstance(command, ServiceOptionsCommand):
        rest = split_overrides(rest)[1]
    values, left, _ = command.make_parser(context).parse_args(list(rest))
    if left:
        yield f"too many arguments: {left}"
    for parameter in command.params:
        value = values.get(parameter.name or "")
        is_given = isinstance(value, str | int | tuple | list) and value != ()
        if is_whole and parameter.required and not is_given:
            yield f"{parameter.name} is missing"
        if isinstance(value, str) and not isinstance(parameter.type, click.Path | click.File):
            parameter.type_cast_value(context, (value,) if parameter.multiple else value)


def complaints(command: str, *, is_whole: bool) -> list[str]:
    try:
        return [
            each
            for arguments in invocations(command)
            for each in mistakes([word.strip("[]") for word in arguments], is_whole=is_whole)
        ]
    except click.BadOptionUsage as error:
        is_named_only = not is_whole and command.endswith(error.option_name)
        return [] if is_named_only else [error.format_message()]
    except click.ClickException as error:
        return [error.format_message()]


def all_complaints(shown: list[tuple[Path, str]], *, is_whole: bool) -> list[str]:
    return [
        f"{short(document)}: {command}: {said}"
        for document, command in shown
        for said in complaints(command, is_whole=is_whole)
    ]


def test_every_command_of_a_guide_is_one_that_click_takes() -> None:
    assert len(WHOLE) > 80
    assert all_complaints(WHOLE, is_whole=True) == []


def test_every_command_within_the_text_is_one_too() -> None:
    assert len(MENTIONED) > 80
    assert all_complaints(MENTIONED, is_whole=False) == []


@pytest.mark.parametrize(
    "command",
    [
        "dynaplan serv graphs.agg:Frontend",
        "dynaplan status --wach",
        "dynaplan export sytemd",
        "dynaplan serve",
        "dynaplan scale decode=3 --for 2h --until-noon",
        "cat x | dynaplan replay a b",
        "FOO=1 dynaplan simulate --seed many --trace x",
        "dynaplan serve graphs.agg:Frontend --log-format xml",
    ],
)
def test_a_wrong_command_would_be_found(command: str) -> None:
    assert complaints(command, is_whole=True)


def served(command: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the graph, the file and the overrides of each ``serve`` of a shipped graph in a line."""
    for name, *arguments in invocations(command):
        overrides, rest = split_overrides(arguments)
        graph = next((each for each in rest if re.fullmatch(r"graphs\.\w+:\w+", each)), "")
        if name == "serve" and graph:
            flag = next((each for each in ("-f", "--config-file") if each in rest), "")
            yield graph, rest[rest.index(flag) + 1] if flag else "", overrides


def configuration(graph: str, file: str, overrides: list[str]) -> Sections:
    """The configuration as ``serve`` reads it; raises what ``serve`` would say."""
    loaded = load_graph(graph, REPOSITORY)
    path = find_config_file(file, REPOSITORY, loaded) if file else None
    config = read_config(path, overrides)
    validate_config(loaded, config)
    return config


WRITTEN = {"results/config_with_planner.yaml"}
"""Files that a command of the same guide writes."""


def test_what_a_guide_serves_is_a_configuration_that_serve_takes() -> None:
    wrong = {}
    for document, command in WHOLE + MENTIONED:
        for graph, file, overrides in served(command):
            if file in WRITTEN:
                continue
            try:
                configuration(graph, file, overrides)
            except DynaplanError as error:
                wrong[f"{short(document)}: {command}"] = str(error)
    assert wrong == {}


def yaml_blocks() -> Iterator[tuple[Path, str]]:
    return ((document, block) for document in [README, *GUIDES] for block in fenced(document, "yaml"))


def test_every_yaml_of_a_guide_is_read_and_that_of_a_deployment_is_valid() -> None:
    graph = load_graph("graphs.disagg:Frontend", REPOSITORY)
    deployments = 0
    for document, block in yaml_blocks():
        read = list(yaml.safe_load_all(block))
        if len(read) == 1 and all(name[0].isupper() for name in read[0]):
            deployments += 1
            validate_config(graph, merge_sections(read_sections(block, short(document)), parse_overrides([])))
    assert deployments >= 2


def test_every_json_and_every_python_of_a_guide_can_be_read() -> None:
    documents = [README, *GUIDES]
    assert [json.loads(block) for document in documents for block in fenced(document, "json")]
    is_async = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    assert [
        compile(block, short(document), "exec", flags=is_async)
        for document in documents
        for block in fenced(document, "python")
    ]


def test_no_exception_of_the_guides_walks_is_out_of_date() -> None:
    shown = {guide.stem: commands(guide) for guide in GUIDES}
    everywhere = [command for found in shown.values() for command in found]
    assert [each for each in ELSEWHERE if not any(one.startswith(each) for one in everywhere)] == []
    stale = [
        f"{name}: {text}"
        for name, walk in WALKS.items()
        for begins, texts in ((True, [*walk.skipped, *walk.after, *walk.until]), (False, walk.instead))
        for text in texts
        if not any(each.startswith(text) if begins else text in each for each in shown[name])
    ]
    assert stale == []
