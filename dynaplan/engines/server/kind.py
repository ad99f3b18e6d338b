"""The differences between engines that run as a server of their own: data, and a few functions."""

from __future__ import annotations

import json
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynaplan.config.parallelism import DATA
from dynaplan.config.settings.worker import WorkerSettings
from dynaplan.engines.port import EngineContext, HandOver
from dynaplan.engines.server.metrics import SignalNames
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.util.errors import ConfigError, TemporaryError

EXIT_USAGE = 2
"""The exit code for a wrong command line, of argparse and click alike; another start cannot help."""

Options = Mapping[str, Any]
"""The worker's section of the configuration, keys in kebab-case."""


@dataclass(frozen=True)
class LaunchLine:
    """The command line that starts an engine's server.

    ``environment`` comes on top of the worker's own. ``files`` (path and text) are written with mode 0600
    before the start and removed after the end: for secrets that an engine cannot take from its environment.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)


Ask = Callable[[str, Mapping[str, Any], str], Awaitable[Mapping[str, Any]]]
"""``ask(path, body, request_id)`` posts to the worker's own engine and returns its JSON answer.

Raises PermanentError when the engine refuses the request (4xx), TemporaryError when it fails.
"""


@dataclass(frozen=True)
class Prefilling:
    """An engine's way of prefilling a prompt for another worker.

    ``run(request, hand_over, ask, ports)`` carries it out; ``ports`` are the leased ports, the HTTP port
    first. ``holds`` is True when the engine keeps the KV entries after it until the decode side has read
    them.
    """

    run: Callable[[RemotePrefillRequest, HandOver, Ask, Sequence[int]], Awaitable[None]]
    holds: bool = True


@dataclass(frozen=True)
class Waking:
    """The paths by which a sleeping engine is woken and a paused one goes on; both are posted to.

    ``paused_path`` answers a GET with ``{"is_paused": true}``. An engine that lacks a path (404) says by
    ``hint`` what its server needs.
    """

    wake_path: str
    resume_path: str
    paused_path: str
    hint: str


@dataclass(frozen=True)
class EngineKind:
    """One engine that runs as a server of its own.

    - ``command(options, context, ports)`` builds the command line; ``ports`` are consecutive, the HTTP port
      first, ``ports_needed(options, context)`` of them
    - ``check(options, gpus)`` raises the ConfigError that starting would
    - ``ready_path`` answers 200 when requests are taken
    - ``parts`` are texts in the command lines of processes without which the engine is dead, though its
      server may go on for a while
    - ``term_grace_s``: seconds that an idle engine may take to end after SIGTERM
    - ``stalls_on_term``: after SIGTERM with requests running, their clients would hang; it is killed instead
    - ``address_in_use`` are texts by which it says that a port was taken
    - ``context_option`` names the option with the context length in tokens, for a server whose
      ``/v1/models`` lacks it
    - ``request_slots(options)``: the most requests computed at once; 0 when it is not known
    - ``measures_memory``: it measures the free memory when it starts (the machine's, where it has no GPU), so
      that no two may start at once
    - ``tells_requests``: its count of running and waiting requests can be relied upon when it drains
    - ``takes_any_name``: it answers whatever model a request names, and its own name cannot be chosen, so
      that ``served-model-name`` is known to dynaplan only
    - ``wake``: how to wake it, for an engine that can sleep
    - ``hides_blocks(options)``: the reason why it cannot tell which KV blocks it holds; empty where it can
    - ``needs_hand_off(options, context)``: it takes only requests whose prompt was prefilled elsewhere
    """

    name: str
    command: Callable[[Options, EngineContext, Sequence[int]], LaunchLine]
    check: Callable[[Options, float], None]
    signals: SignalNames
    prefilling: Prefilling | None = None
    ports_needed: Callable[[Options, EngineContext], int] = lambda options, context: 1
    ready_path: str = "/health"
    metrics_path: str = "/metrics"
    metrics_timeout_s: float = 3.0
    parts: tuple[str, ...] = ()
    term_grace_s: float = 15.0
    stalls_on_term: bool = False
    address_in_use: tuple[str, ...] = ("address already in use", "Errno 98", "EADDRINUSE")
    context_option: str = "max-model-len"
    request_slots: Callable[[Options], int] = lambda options: _whole(options.get("max-num-seqs"))
    tells_requests: bool = True
    takes_any_name: bool = False
    measures_memory: bool = True
    wake: Waking | None = None
    hides_blocks: Callable[[Options], str] = lambda options: "it has no way to"
    needs_hand_off: Callable[[Options, EngineContext], bool] = lambda options, context: False


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def prefill_body(request: RemotePrefillRequest, **fields: Any) -> dict[str, Any]:
    """Reduce the client's request to its prompt: one token, not streamed; add the engine's own fields."""
    dropped = ("stream_options", "min_tokens", "best_of")
    body = {key: value for key, value in request.body.items() if key not in dropped}
    body |= {"stream": False, "max_tokens": 1, "n": 1}
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    return {**body, **fields}


def sequential(hand_off: str, fields: Mapping[str, Any]) -> Prefilling:
    """Prefill first, then decode: ``fields`` join the prefill request, its answer has ``hand_off``."""

    async def run(request: RemotePrefillRequest, hand_over: HandOver, ask: Ask, ports: Sequence[int]) -> None:
        body = prefill_body(request, **fields)
        answer = await ask(request.path, body, request.request_id)
        taken = answer.get(hand_off)
        if not isinstance(taken, Mapping):
            raise TemporaryError(f"the engine's answer has no {hand_off}: it computed without handing off")
        await hand_over({hand_off: dict(taken)}, cached_tokens_of(answer))

    return Prefilling(run)


def cached_tokens_of(answer: Mapping[str, Any]) -> int | None:
    """Return the tokens of the prompt that came out of a cache, as an OpenAI answer says; None without it."""
    found: Any = answer
    for key in ("usage", "prompt_tokens_details", "cached_tokens"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if type(found) is int and found >= 0 else None


def check_common(options: Options, engine: str, set_here: frozenset[str]) -> None:
    """Raise ConfigError for no model, for an option that dynaplan sets, and for times that are no times."""
    if not isinstance(options.get("model"), str) or not options["model"].strip():
        raise ConfigError(
            f"model is {options.get('model')!r}", hint=f"Expected the model that {engine} serves."
        )
    for option in sorted(set_here & set(options)):
        if options[option] not in (None, False):
            raise ConfigError(
                f"{option} cannot be set with engine {engine}", hint="Leave it out: dynaplan sets it."
            )
    WorkerSettings.from_options(options)


def under_one_name(options: Options, names: Mapping[str, str]) -> dict[str, Any]:
    """The options that are set, those of ``names`` under the name there.

    Raises ConfigError where two names of the same option have different values.
    """
    found: dict[str, tuple[str, Any]] = {}
    for option, value in options.items():
        if value is None:
            continue
        other, taken = found.setdefault(names.get(option, option), (option, value))
        if taken != value:
            raise ConfigError(
                f"{other} is {taken!r} and {option} is {value!r}",
                hint="Keep one: they are two names of the same option.",
            )
    return {name: value for name, (_, value) in found.items()}


def check_no_data_parallel(options: Options, engine: str) -> None:
    """Raise ConfigError for data parallel ranks: this engine has none within one server."""
    for name in DATA:
        if options.get(name) not in (None, 1):
            raise ConfigError(
                f"{name} is {options[name]!r}, but one worker of engine {engine} has one copy of the model",
                hint="Leave it out, and set ServiceArgs.workers.",
            )


def hub_token(options: Options) -> dict[str, str]:
    """The environment variable with the token for the Hugging Face hub; a command line can be read by all."""
    return {"HF_TOKEN": str(options["hf-token"])} if options.get("hf-token") else {}


def loopback_transport(environ: Mapping[str, str]) -> dict[str, str]:
    """Keep UCX, which moves KV entries for NIXL, from listening on the machine's network addresses.

    Returns the environment variable to add; none when ``environ`` names the devices that UCX may use.
    """
    return {} if environ.get("UCX_NET_DEVICES") else {"UCX_NET_DEVICES": "lo"}


def command_words(value: Any, option: str) -> list[str]:
    """Split a command, given as one text or as a list of words; [] when it is not given."""
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{option} is {value!r}: {error}", hint="Expected a command line.") from None
    if words is None:
        return []
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{option} is {value!r}", hint="Expected a command: a text, or a list of words.")
    return words


def real_gpus(environ: Mapping[str, str]) -> list[str]:
    """The UUIDs of this worker's GPUs, simulated GPUs left out."""
    gpus = [gpu.strip() for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return [gpu for gpu in gpus if gpu and not gpu.startswith(("GPU-SIM-", "-"))]


def drain_deadline_s(options: Options, environ: Mapping[str, str]) -> float:
    """The seconds that the worker's requests may take to finish when it leaves."""
    own = options.get("drain-deadline") or environ.get("DYNAPLAN_DRAIN_DEADLINE_S")
    return float(own or WorkerSettings.drain_deadline_s)


def lora_names(modules: Any) -> list[str]:
    """Return the names in vLLM's ``lora-modules``: ``name=path``, or JSON with a ``name``, one or a list.

    What is neither is left out: the engine refuses it at its start.
    """
    entries = modules if isinstance(modules, list) else [] if modules is None else [modules]
    texts = [text for each in entries for text in (each.split() if _is_plain_text(each) else [each])]
    return [name for each in texts if (name := _adapter_name(each))]


def _is_plain_text(entry: Any) -> bool:
    return isinstance(entry, str) and not entry.lstrip().startswith("{")


def _adapter_name(entry: Any) -> str:
    if isinstance(entry, str) and not _is_plain_text(entry):
        try:
            entry = json.loads(entry)
        except ValueError:
            return ""
    if isinstance(entry, dict):
        return str(entry.get("name") or "")
    name, equals, _ = str(entry).partition("=")
    return name if equals else ""
