"""``dynaplan init``: look at this box, and write a commented file of its models that starts as it is.

1. **What is here.** GGUF files of every tool that keeps some (``engines.local_models``), and directories of
   Hugging Face's cache that vLLM loads. MODEL arguments choose among them, or name files elsewhere.
2. **What each gets.** The rungs of ``LADDER`` are tried from the first one down: so many requests at once,
   of such a context. The first that fits on one GPU is taken, or in the memory of a machine without GPUs;
   where none does, the first that fits on several. What fits is what ``doctor -f`` would say of the file.
3. **What does not fit or run** stands in the file as a comment with the reason: the file starts without it.

Other tools' files are not turned into ours: ``serve`` takes them as they are, and the file says so.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dynaplan.cli.export import write_text
from dynaplan.util.amounts import gib
from dynaplan.util.errors import ConfigError, SeveralErrors, UserError

if TYPE_CHECKING:
    from dynaplan.cli.model_needs import ModelNeeds
    from dynaplan.models.model import Device
    from dynaplan.models.rules.memory import Holding, Need

FILE = "models.yaml"

LADDER = ((4, 32768), (4, 16384), (4, 8192), (2, 8192), (1, 8192), (1, 4096), (1, 2048))
"""Requests at once, and the context of each in tokens: first less than a long chat, then fewer of them."""

LLAMA_SWAP_PLACES = ("config.yaml", "~/.config/llama-swap/config.yaml", "/etc/llama-swap/config.yaml")
"""Where people keep llama-swap's file, the first as its own README has it."""


@click.command(name="init")
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path(FILE), help=f"Default: {FILE}.")
@click.option("--stdout", "is_printed", is_flag=True, help="Print the file, and write nothing.")
def command(models: tuple[str, ...], output: Path, is_printed: bool) -> None:
    """Write a file of this box's models that `dynaplan serve` starts, with the reason for each number.

    All models that are here, or those that MODEL names: a path, or a name that `dynaplan pull`, Ollama,
    Hugging Face, LM Studio or llama.cpp has. Never overwrites a file.
    """
    if output.exists() and not is_printed:
        raise ConfigError(
            f"{output} is there already, and is not overwritten",
            hint=f"`dynaplan init -o OTHER.yaml`, or --stdout. `dynaplan doctor -f {output}` looks at it.",
        )
    text, served = starting_file(list(found_models(models)), output.name)
    write_text(text, None if is_printed else output)
    if not is_printed:
        click.echo(f"{_counted(served, 'model')}. Start it:  dynaplan serve {output}")


# -- 1. what is here ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundModel:
    """A model on this box, or named by the user: its key in the file, what ``model`` says, and its place."""

    key: str
    model: str
    place: Path
    tool: str
    engine: str = "llamacpp"


def found_models(asked: Sequence[str]) -> Iterator[FoundModel]:
    """Yield the models that were asked for, or all on this box, each once; ConfigError if it has none."""
    from dynaplan.engines.local_models import local_models

    if asked:
        yield from map(_asked_model, dict.fromkeys(asked))
        return
    here = ((each.name, each.path, each.tool) for each in local_models(os.environ))
    seen: dict[Path, FoundModel] = {}
    for found in chain((_of_file(*each) for each in here), hub_directories()):
        seen.setdefault(found.place.resolve(), found)
    if not seen:
        raise ConfigError(
            "there is no model on this box: Ollama, Hugging Face, LM Studio and llama.cpp have none here",
            hint="`dynaplan pull smollm2` fetches a small one; or name yours: `dynaplan init PATH.gguf`.",
        )
    yield from seen.values()


def _asked_model(text: str) -> FoundModel:
    from dynaplan.engines.local_models import find_model, is_gguf, not_found_hint

    path = Path(os.path.expanduser(text))
    if path.is_dir() and (path / "config.json").is_file():
        return FoundModel(path.resolve().name, str(path.resolve()), path, "", "vllm")
    if is_gguf(path):
        return _of_file(str(path.resolve()), path, "")
    if found := find_model(text, Path.cwd(), os.environ):
        return _of_file(text, found.path, found.tool)
    if hub := next((each for each in hub_directories() if each.model.lower() == text.lower()), None):
        return hub
    raise ConfigError(f"{text} is no model on this box", hint=not_found_hint(text, os.environ))


def _of_file(model: str, path: Path, tool: str) -> FoundModel:
    """Return a GGUF file under a short key: Ollama's name for it, else what the file is called."""
    from dynaplan.engines.model_files import gguf_stem

    key = model if tool in ("Ollama", "dynaplan pull") else gguf_stem(path)
    return FoundModel(key.lower(), model, path, tool)


def hub_directories() -> Iterator[FoundModel]:
    """Yield the models of Hugging Face's cache that are directories of safetensors, as vLLM loads them."""
    from dynaplan.engines.local_models import hub_snapshots

    for name, snapshot in hub_snapshots(os.environ):
        if (snapshot / "config.json").is_file() and any(snapshot.glob("*.safetensors")):
            yield FoundModel(name.rpartition("/")[2].lower(), name, snapshot, "Hugging Face", "vllm")


# -- 2. what each gets ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FittedModel:
    """A model with what it gets; or, with an ``obstacle``, what keeps it from being served here."""

    found: FoundModel
    requests: int = 0
    context_tokens: int = 0
    trained_tokens: int = 0
    need: Need | None = None
    obstacle: str = ""

    @property
    def lines(self) -> list[str]:
        """The entry of the file, without its reasons."""
        found = self.found
        model = str(found.place) if found.engine == "vllm" and not found.tool else found.model
        lines = [f"  {json.dumps(found.key)}:", f"    model: {json.dumps(model)}"]
        if found.engine != "llamacpp":
            lines.append(f"    engine: {found.engine}")
        if self.context_tokens:
            lines.append(f"    max-model-len: {self.context_tokens}")
        if self.requests and found.engine == "llamacpp":
            lines.append(f"    parallel: {self.requests}")
        return lines


def fitted(found: FoundModel) -> tuple[FittedModel, Sequence[Device]]:
    """Return the model with the first rung of the ladder that fits one device, or else several; the devices.

    Where none fits, or the model cannot be read, it has an ``obstacle``.
    """
    from dynaplan.cli.model_needs import why_without_room
    from dynaplan.engines.model_memory import gguf_shape, hf_shape
    from dynaplan.models.rules.eviction import choose

    entry = FittedModel(found)
    devices: Sequence[Device] = ()
    try:
        shape = gguf_shape(found.place) if found.engine == "llamacpp" else hf_shape(found.place)
        entry = replace(entry, trained_tokens=shape.trained_tokens if shape else 0)
        fitting = []
        for rung in _rungs(entry):
            needs = _needs_of([rung])
            entry, devices = replace(rung, need=needs.needs[0]), needs.devices
            assert entry.need
            if choice := choose(entry.need, devices, {}, ()):
                fitting.append(entry)
                if len(choice.devices) == 1:
                    return entry, devices
        if fitting:
            return fitting[0], devices
        assert entry.need
        return replace(entry, obstacle="; ".join(why_without_room(entry.need, devices))), devices
    except UserError as error:
        first = error.errors[0] if isinstance(error, SeveralErrors) else error
        return replace(entry, obstacle=f"{first.args[0]}. {first.hint}"), devices


def _rungs(entry: FittedModel) -> list[FittedModel]:
    """Return the model at each rung of the ladder, with no more context than it was trained for."""
    most = entry.trained_tokens or LADDER[-1][1]
    rungs = dict.fromkeys((requests, min(tokens, most)) for requests, tokens in LADDER)
    return [replace(entry, requests=requests, context_tokens=tokens) for requests, tokens in rungs]


def _needs_of(entries: Iterable[FittedModel]) -> ModelNeeds:
    """Return what ``doctor -f`` finds the entries to need; raises ConfigError as ``serve`` does."""
    from dynaplan.cli.doctor import read_model_needs

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / FILE
        file.write_text("\n".join(["Models:", *chain.from_iterable(each.lines for each in entries), ""]))
        return read_model_needs(str(file), (), None, 0)


# -- 3. what is told ------------------------------------------------------------------------------------


def starting_file(found: Sequence[FoundModel], name: str) -> tuple[str, int]:
    """Return the text of a file with these models, and how many of them it serves.

    Raises ConfigError where none of them can run here, with the reason for each.
    """
    fits = [fitted(each) for each in _with_keys_of_their_own(found)]
    entries = [each for each, _ in fits]
    devices = next((devices for _, devices in fits if devices), ())
    served = [each for each in entries if not each.obstacle]
    if not served:
        raise ConfigError(
            "none of the models on this box can be served here",
            hint="\n  ".join(f"{each.found.model}: {each.obstacle}" for each in entries),
        )
    body = list(_entries_with_reasons(served, devices))
    for each in (entry for entry in entries if entry.obstacle):
        body += ["", f"  # Not served here: {each.obstacle}", *(f"  # {line[2:]}" for line in each.lines)]
    text = "\n".join([*_header(name), "", "Models:", *body[1:], "", *_footer(served, name), ""])
    return text, len(served)


def _with_keys_of_their_own(found: Sequence[FoundModel]) -> Iterator[FoundModel]:
    """Yield the models with a number behind each key that another one has."""
    taken = {each.key for each in found}
    seen: set[str] = set()
    for each in found:
        numbered = (f"{each.key}-{number}" for number in count(2))
        key = each.key if each.key not in seen else next(key for key in numbered if key not in taken)
        taken.add(key)
        seen.add(key)
        yield replace(each, key=key)


def _header(name: str) -> Iterator[str]:
    from dynaplan.cli import doctor

    yield "# Models of this box, loaded on request behind one address. Start them:"
    yield f"#     dynaplan serve {name}"
    yield f"# `dynaplan doctor -f {name}` says what fits; docs/guides/several-models.md has every key."
    yield "#"
    for check in (doctor.gpus, doctor.engines, doctor.memory):
        for finding in check():
            if finding.level is not doctor.Level.NOTE or check is doctor.gpus:
                yield f"# {finding.topic}: {finding.says}"
    yield f"# disk: {gib(shutil.disk_usage(Path.home()).free)} free in {Path.home()}"
    for place in LLAMA_SWAP_PLACES:
        if number := _llama_swap_models(Path(os.path.expanduser(place))):
            models = _counted(number, "model")
            yield f"# llama-swap's {place} has {models}: `dynaplan serve {place}` serves it as it is."


def _llama_swap_models(path: Path) -> int:
    from dynaplan.cli.imported_models import imported_file

    try:
        found = imported_file(path) if path.is_file() else None
    except UserError:
        return 0
    return len(found.models) if found else 0


def _entries_with_reasons(entries: Sequence[FittedModel], devices: Sequence[Device]) -> Iterator[str]:
    """Yield each entry below its reasons; a model goes beside those before it, as far as they fit at once."""
    from dynaplan.models.rules.eviction import choose
    from dynaplan.models.rules.memory import promise

    holdings: dict[str, Holding] = {}
    for entry in entries:
        assert entry.need
        choice = choose(entry.need, devices, holdings, ())
        if choice:
            holdings[entry.found.key] = promise(entry.need, choice.devices)
        yield ""
        yield f"  # {_origin(entry.found)}"
        yield f"  # {_context_reason(entry)}"
        yield f"  # {_place(entry.need, choice.devices if choice else ())}"
        yield from entry.lines


def _origin(found: FoundModel) -> str:
    from dynaplan.engines.model_facts import read_facts

    facts = read_facts(found.key, {"engine": found.engine, "model": str(found.place)})
    parameters = f"{facts.parameters / 1e9:.3g} B parameters" if facts.parameters else ""
    said = [parameters, facts.quantization, f"{gib(facts.size_bytes)} of weights"]
    return f"{', '.join(filter(None, said))}. {found.tool or 'At'}{':' * bool(found.tool)} {found.place}"


def _context_reason(entry: FittedModel) -> str:
    tokens, trained = entry.context_tokens, entry.trained_tokens
    if tokens == trained:
        why = "what it was trained for"
    elif tokens == LADDER[0][1]:
        why = f"enough for most; it was trained for {trained}"
    elif trained:
        why = f"what fits; it was trained for {trained}"
    else:
        why = "little, since its file does not tell what it was trained for"
    at_once = "" if entry.found.engine != "llamacpp" else f"{_counted(entry.requests, 'request')} at once, "
    return f"{at_once}{tokens} tokens each: {why}."


def _place(need: Need, devices: tuple[int, ...]) -> str:

    size = f"{gib(need.bytes_each)}{' each' if need.places > 1 else ''}"
    if not devices:
        return f"Takes {size}. Loaded in the place of others: there is no room beside them."
    if not need.devices:
        return f"Takes {size} of the machine's memory: its engine computes on the CPU here."
    numbers = " and ".join(map(str, devices))
    return f"Takes {size} on GPU {numbers}."


def _footer(served: Sequence[FittedModel], name: str) -> Iterator[str]:
    """Say what fits at once, in the words of ``doctor``."""
    from dynaplan.cli.doctor import model_findings

    for said in model_findings(_needs_of(served), name):
        advice = f" {said.advice}" if said.advice else ""
        yield f"# {said.topic}: {said.says}.{advice}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
