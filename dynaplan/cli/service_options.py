"""Commands that take options of services: ``--Service.key=value``, or a section's options as flags.

The flags are the options of ``--Service.key=value``, so that what ``config/settings`` declares once is here
too. Other ways to name a model or its options are answered with the one of ``serve``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from dynaplan.config.overrides import NEGATIVE, split_overrides, typed_value
from dynaplan.config.settings.fields import Options, kebab, options_of
from dynaplan.engines.pulled_models import CATALOGUE
from dynaplan.util.errors import ConfigError, nearest

HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[\w.-]+(?<!\.py)", re.ASCII)
"""``organization/model``, the name of a model on the Hugging Face hub."""


class ServiceOptionsCommand(click.Command):
    """Takes ``--Service.key=value`` out of the arguments into ``obj`` before click sees the rest.

    Everything else that click does not know stays an error: a misspelt option must not become an override.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        overrides, rest = split_overrides(args)
        ctx.obj = list(overrides)
        return super().parse_args(ctx, list(rest))


ARGUMENTS = "dynaplan.arguments"
"""The key of a context's ``meta`` that holds the arguments of ``serve`` as they were typed."""


WHAT_IS_SERVED = """What is to be served? One of these:
  a model:         dynaplan serve model.gguf, or its name; `dynaplan pull` lists small ones to begin with
  several models:  dynaplan serve models.yaml, a.gguf b.gguf, a directory, a file of llama-swap or llama.cpp
  a graph:         dynaplan serve graphs.disagg:Frontend -f disagg.yaml, with simulated engines: no GPU"""
"""The answer to a ``serve`` of nothing."""


class ServeCommand(ServiceOptionsCommand):
    """Answers an option of a service that has no section with the way to write it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = tuple(args)
        try:
            return super().parse_args(ctx, list(args))
        except click.MissingParameter as error:
            raise click.MissingParameter(WHAT_IS_SERVED, ctx, error.param) from None
        except click.NoSuchOption as error:
            hint = option_hint(error.option_name, args)
            if not hint:
                raise
            raise click.UsageError(f"No such option {error.option_name!r}. {hint}", ctx) from None


GRAPH_OF_A_MODEL = "graphs.agg:Frontend"
"""The graph that serves a model by itself."""


GRAPH_OF_MODELS = "dynaplan.components:Frontend"
"""The graph of a file with a section ``Models``, and of several models: it has no planner."""

GRAPH_OF_PLANNED_MODELS = "dynaplan.planned_components:Frontend"
"""The same, where a model has a planner of its own."""


def graph_of_models(graph: str, is_planned: bool) -> str:
    """Return the graph that serves models with or without planners; a graph of the user's stays."""
    if graph not in (GRAPH_OF_MODELS, GRAPH_OF_PLANNED_MODELS):
        return graph
    return GRAPH_OF_PLANNED_MODELS if is_planned else GRAPH_OF_MODELS


def file_for(model: str) -> str:
    """Return the shipped YAML of the engine that takes this model."""
    return "llamacpp.yaml" if engine_of_model(model) == "llamacpp" else "vllm.yaml"


def engine_of_model(model: str) -> str:
    """Return the engine that serves a model which is named without one."""
    from dynaplan.config.model_entries import engine_for
    from dynaplan.engines.local_models import find_model, is_gguf

    path = Path(os.path.expanduser(model))
    if model in CATALOGUE or is_gguf(path) or find_model(model, Path.cwd(), os.environ):
        return "llamacpp"
    return engine_for(model)


def serve_command(model: str, file: str = "") -> str:
    """Return the command that serves a model by itself, with that file or the one of its engine."""
    file = file or file_for(model)
    return f"dynaplan serve {GRAPH_OF_A_MODEL} -f {file} --Common.model={shlex.quote(model)}"


def model_override(model: str) -> str:
    """Return the option that names the model; one that lies here by its absolute path."""
    path = Path(os.path.expanduser(model))
    return f"--Common.model={json.dumps(str(path.absolute()) if path.exists() else model)}"


def models_overrides(models: Sequence[str]) -> list[str]:
    """Return the options that name several models, each under the last part of its path."""
    from dynaplan.engines.registry import model_location

    options = []
    for model in models:
        engine = engine_of_model(model)
        location, name = model_location(engine, model, Path.cwd())
        name = name or model
        options += [f"--Models.{name}.model={json.dumps(location)}", f"--Models.{name}.engine={engine}"]
    return options


SETTINGS_SUFFIXES = (".yaml", ".yml", ".json", ".ini")


def is_models_file(text: str) -> bool:
    """Return whether this is a file of settings, or a directory of models, in the place of a graph."""
    path = Path(os.path.expanduser(text))
    if path.is_dir():
        # What else lies beside GGUF files, a config.json or a script, does not make them another thing.
        is_other = (path / "__init__.py").is_file() or any(path.glob("*.safetensors"))
        return not is_other and any(path.rglob("*.gguf"))
    if not text.lower().endswith(SETTINGS_SUFFIXES):
        return False
    from dynaplan.cli.graph_files import shipped_file

    return path.is_file() or shipped_file(text) is not None


def is_model(text: str) -> bool:
    """Return whether this names a model, and neither a module nor a directory of graphs."""
    from dynaplan.engines.local_models import find_model, is_gguf

    path = Path(os.path.expanduser(text))
    if text.lower().endswith(".gguf"):
        return True
    if path.is_dir():
        return (path / "config.json").is_file() and not (path / "__init__.py").is_file()
    if path.is_file() or path.with_name(f"{path.name}.py").is_file():
        return is_gguf(path)
    parent = text.partition("/")[0]
    if HUB_NAME.fullmatch(text) is not None and parent != "graphs" and not Path(parent).is_dir():
        return True
    return not _is_module(text) and (
        text in CATALOGUE or find_model(text, Path.cwd(), os.environ) is not None
    )


def _is_module(text: str) -> bool:
    """True when the text begins with the name of a module that can be imported, as a graph's does."""
    name = re.split(r"[.:]", text, maxsplit=1)[0]
    is_here = Path(name).is_dir() or Path(f"{name}.py").is_file()
    return name.isidentifier() and (is_here or importlib.util.find_spec(name) is not None)


HUB_ADDRESS = re.compile(r"(?:(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/|hf:(?://)?)(?P<name>.+)")
"""The address of a model on the Hugging Face hub, as other tools take it."""


def refuse_what_is_no_graph(text: str) -> None:
    """Raise ConfigError for a model's address, a directory without either, and a file that is not there."""
    if found := HUB_ADDRESS.fullmatch(text):
        raise ConfigError(
            f"{text} is an address: dynaplan downloads no model from there",
            hint=download_hint(found["name"]),
        )
    path = Path(os.path.expanduser(text))
    if path.is_dir() and ("/" in text or not text.isidentifier()) and not any(path.glob("*.py")):
        raise ConfigError(
            f"{text} is a directory without a model or a graph",
            hint="A model's directory has a config.json (vLLM, SGLang, TensorRT-LLM); llama.cpp takes "
            "the path of a .gguf file. `dynaplan pull` lists small models to begin with.",
        )
    if text.lower().endswith(SETTINGS_SUFFIXES):
        files = [each.name for each in Path.cwd().iterdir() if each.name.endswith(SETTINGS_SUFFIXES)]
        raise ConfigError(
            f"{text}: no such file in {Path.cwd()}",
            hint=nearest(text, files) or "`dynaplan init` writes one of the models that are on this machine.",
        )


def download_hint(name: str) -> str:
    """Return how a repository of the hub is fetched, and served then."""
    repository = "/".join(name.split("/")[:2])
    return (
        f"`hf download {repository} --local-dir DIRECTORY` fetches it; then `dynaplan serve "
        "DIRECTORY/FILE.gguf` (llama.cpp), or `dynaplan serve DIRECTORY` (vLLM).\n"
        f"  vLLM fetches by itself what is no GGUF: `dynaplan serve {repository}`."
    )


MODEL_NAME = re.compile(r"[A-Za-z][\w.-]*(:[\w.-]+)?", re.ASCII)


def model_hint(text: str) -> str:
    """Return what to do when a word that names no graph was meant as a model; empty for other words."""
    is_class = text.partition(":")[2].isidentifier()
    if is_class or not MODEL_NAME.fullmatch(text) or text.startswith("graphs."):
        return ""
    pulled = ", ".join(CATALOGUE)
    return (
        f"If it is a model: `dynaplan pull` fetches {pulled}; any other is served by the path of its .gguf "
        "file, or by its name on the hub with vLLM: `dynaplan serve ORGANIZATION/MODEL`."
    )


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


@dataclass
class Flags:
    """The flags of one command line: key -> value.

    ``others`` are unknown to the section, as an engine's own would be.
    """

    known: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


class ComponentCommand(ServiceOptionsCommand):
    """Takes the options of ``table`` as flags into ``ctx.meta[FLAGS]`` before click sees the rest.

    ``listed`` are the ones that the help page shows, under ``heading``; ``aliases`` are other names of keys.
    """

    def __init__(
        self,
        *arguments: Any,
        table: Options,
        listed: Options,
        heading: str,
        aliases: dict[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(*arguments, **more)
        self._table = table
        self._listed = listed
        self._heading = heading
        self.aliases = aliases or {}

    @property
    def flags(self) -> list[str]:
        """Every flag with its dashes: the command's own, aliases and the section's."""
        own = [name for each in self.params for name in each.opts if name.startswith("--")]
        return [*own, *(f"--{name}" for name in (*self.aliases, *self._table))]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name for each in self.get_params(ctx) for name in (*each.opts, *each.secondary_opts)}
        flags, rest = self._split(list(args), own)
        ctx.meta[FLAGS] = flags
        return super().parse_args(ctx, rest)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, and below them the section's."""
        super().format_options(ctx, formatter)
        with formatter.section(self._heading):
            formatter.write_dl([(f"--{name}", each.help) for name, each in self._listed.items()])

    def _split(self, waiting: list[str], own: set[str]) -> tuple[Flags, list[str]]:
        flags, rest = Flags(), []
        while waiting:
            token = waiting.pop(0)
            name, is_given, text = token.partition("=")
            if token == "--" or not token.startswith("--") or name in own or "." in name:
                rest.append(token)
            else:
                key = kebab(name.removeprefix("--"))
                self._take(flags, self.aliases.get(key, key), text if is_given else None, waiting)
        return flags, rest

    def _take(self, flags: Flags, key: str, text: str | None, waiting: list[str]) -> None:
        """Enter one flag, with the word after it where it needs one."""
        option = self._table.get(key)
        denied = self._table.get(key.removeprefix("no-"))
        if option is None and denied is not None and denied.kind is bool and text is None:
            flags.known[key.removeprefix("no-")] = False
            return
        if text is None and not (option and option.kind is bool) and waiting and _is_value(waiting[0]):
            text = waiting.pop(0)
        taken = flags.others if option is None else flags.known
        if text is None:
            taken[key] = True
        else:
            taken[key] = text if option and option.kind is str else typed_value(["", key], text)


FLAGS = "dynaplan.flags"
"""The key of ``ctx.meta`` that holds the ``Flags``."""


def known_flags(ctx: click.Context) -> dict[str, Any]:
    """Return the section's flags; raise the usage error of the first one that nobody knows."""
    flags: Flags = ctx.meta[FLAGS]
    for name in flags.others:
        meant = nearest(f"--{name}", getattr(ctx.command, "flags", ()))
        hint = meant if meant.startswith("Did") else "`--help` lists the options."
        raise click.UsageError(f"No such option '--{name}'. {hint}", ctx)
    return flags.known


def _is_value(word: str) -> bool:
    return not word.startswith("-") or NEGATIVE.match(word) is not None
