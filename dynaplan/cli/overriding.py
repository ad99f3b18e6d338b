"""Commands that take ``--Service.key=value``, and their answers to other ways to name a model."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from dynaplan.engines.pulled_models import CATALOGUE

HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[\w.-]+(?<!\.py)", re.ASCII)
"""``organization/model``, the name of a model on the Hugging Face hub."""


class OverridingCommand(click.Command):
    """Takes ``--Service.key=value`` out of the arguments into ``obj`` before click sees the rest.

    Everything else that click does not know stays an error: a misspelt option must not become an override.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split the overrides off, then parse as usual."""
        from dynaplan.config.overrides import split_overrides

        overrides, rest = split_overrides(args)
        ctx.obj = list(overrides)
        return super().parse_args(ctx, list(rest))


ARGUMENTS = "dynaplan.arguments"
"""The key of a context's ``meta`` that holds the arguments of ``serve`` as they were typed."""


class ServeCommand(OverridingCommand):
    """Answers an option of a service that has no section with the way to write it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as usual; an option of a service, such as ``--model``, is an error with a hint."""
        ctx.meta[ARGUMENTS] = tuple(args)
        try:
            return super().parse_args(ctx, list(args))
        except click.NoSuchOption as error:
            hint = option_hint(error.option_name, args)
            if not hint:
                raise
            raise click.UsageError(f"No such option {error.option_name!r}. {hint}", ctx) from None


GRAPH_OF_A_MODEL = "graphs.agg:Frontend"
"""The graph that serves a model by itself."""


def file_for(model: str) -> str:
    """Return the shipped YAML of the engine that takes this model."""
    is_gguf = model.lower().endswith(".gguf") or model in CATALOGUE
    return "llamacpp.yaml" if is_gguf else "vllm.yaml"


def serve_command(model: str, file: str = "") -> str:
    """Return the command that serves a model by itself, with that file or the one of its engine."""
    file = file or file_for(model)
    return f"dynaplan serve {GRAPH_OF_A_MODEL} -f {file} --Common.model={shlex.quote(model)}"


def model_override(model: str) -> str:
    """Return the option that names the model; one that lies here by its absolute path."""
    path = Path(model).expanduser()
    return f"--Common.model={json.dumps(str(path.absolute()) if path.exists() else model)}"


def is_model(text: str) -> bool:
    """Tell whether this names a model, and neither a module nor a directory of graphs."""
    path = Path(text).expanduser()
    if text.lower().endswith(".gguf"):
        return True
    if text in CATALOGUE:
        return not path.exists() and not path.with_name(f"{text}.py").exists()
    if path.is_dir():
        return (path / "config.json").is_file() and not (path / "__init__.py").is_file()
    parent = text.partition("/")[0]
    return HUB_NAME.fullmatch(text) is not None and parent != "graphs" and not Path(parent).is_dir()


def option_hint(name: str, arguments: Sequence[str]) -> str:
    """Return how an option of a service is written, ``--Section.key=value``; empty for no such option."""
    key = name.lstrip("-").replace("_", "-")
    section = _section_of(key)
    if not section:
        return ""
    value = _value_of(name, arguments)
    if key == "model" and value:
        return f"Write `{serve_command(value)}`."
    return f"Write --{section}.{key}={shlex.quote(value) if value else 'VALUE'}."


def _section_of(key: str) -> str:
    """Return the section of the stock graphs that has this key; empty for none."""
    from dynaplan.config import stock
    from dynaplan.config.settings.fields import options_of
    from dynaplan.config.settings.worker import ModelSettings

    tables = {
        "Common": {*options_of(ModelSettings), "engine"},
        "Planner": stock.PLANNER.keys(),
        "Processor": stock.PROCESSOR.keys(),
        "Frontend": stock.FRONTEND.keys(),
        "VllmWorker": stock.WORKER.keys(),
    }
    return next((section for section, keys in tables.items() if key in keys), "")


def _value_of(name: str, arguments: Sequence[str]) -> str:
    """Return the value that follows an option, after a space or ``=``; empty for none."""
    for place, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
        if argument == name:
            following = arguments[place + 1 : place + 2]
            return "".join(each for each in following if not each.startswith("-"))
    return ""
