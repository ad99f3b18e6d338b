"""What differs between engines that run as a server of their own: data, and a few functions."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynaplan.adapters.engines.common.signals import SignalNames
from dynaplan.domain.engine import EngineContext
from dynaplan.domain.errors import ConfigError, TemporaryError
from dynaplan.domain.parallelism import DATA
from dynaplan.domain.prefill import RemotePrefillRequest
from dynaplan.domain.settings.worker import WorkerSettings
from dynaplan.ports import HandOver

EXIT_USAGE = 2
"""The exit code of a command line that is wrong, by argparse and click alike: it will not get better."""

Options = Mapping[str, Any]
"""The worker's section of the configuration, keys in kebab-case."""


@dataclass(frozen=True)
class LaunchLine:
    """How to start an engine's server.

    ``environment`` comes on top of the worker's own. ``files`` are written (mode 0600) before the start and
    removed after the end: where secrets go that an engine cannot take from its environment.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)


Ask = Callable[[str, Mapping[str, Any], str], Awaitable[Mapping[str, Any]]]
"""``ask(path, body, request_id)``: the own engine's JSON answer to a POST.

Raises PermanentError for what the engine will never do (4xx), TemporaryError for what it failed to do.
"""


@dataclass(frozen=True)
class Prefilling:
    """How a prompt is prefilled for another worker.

    ``run(request, hand_over, ask, ports)`` carries it out; ``ports`` are those that were leased, the HTTP
    port first. ``holds`` says whether the engine keeps the KV entries after it, until the decode side has
    read them.
    """

    run: Callable[[RemotePrefillRequest, HandOver, Ask, Sequence[int]], Awaitable[None]]
    holds: bool = True


@dataclass(frozen=True)
class EngineKind:
    """One engine that runs as a server of its own.

    - ``command(options, context, ports)`` is how to start it; ``ports`` are consecutive, the HTTP port
      first, and ``ports_needed(options, context)`` is how many it takes
    - ``check(options, gpus)`` raises the ConfigError that starting would
    - ``ready_path`` answers 200 when requests are taken
    - ``parts`` are texts in the command lines of processes that it is dead without, though its server may
      go on for a while
    - ``term_grace_s`` is what it may take to end after SIGTERM when it has nothing to do
    - ``address_in_use`` are texts by which it says that a port was taken
    - ``stalls_on_term``: told to end while it has requests, it lets their clients hang; it is killed then
    - ``context_option`` is the option with the context length in tokens, in case ``/v1/models`` does not
      tell it; ``request_slots(options)`` is the most requests at once, 0 when it is not known
    - ``measures_memory``: it measures the free memory when it starts, the machine's where it has no GPU, so
      that two must not start at once
    - ``tells_requests``: whether its count of running and waiting requests can be relied upon when it drains
    - ``takes_any_name``: it answers whatever model a request names, and its own name cannot be chosen: then
      ``served-model-name`` is ours alone
    - ``needs_hand_off(options, context)``: whether it takes only requests whose prompt is prefilled elsewhere
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
    needs_hand_off: Callable[[Options, EngineContext], bool] = lambda options, context: False


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def prefill_body(request: RemotePrefillRequest, **fields: Any) -> dict[str, Any]:
    """The client's request reduced to its prompt: one token, not streamed; plus the engine's own fields."""
    dropped = ("stream_options", "min_tokens", "best_of")
    body = {key: value for key, value in request.body.items() if key not in dropped}
    body |= {"stream": False, "max_tokens": 1, "n": 1}
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    return {**body, **fields}


def sequential(hand_off: str, fields: Mapping[str, Any]) -> Prefilling:
    """Prefill first, then decode: ``fields`` go into the prefill request, ``hand_off`` is in its answer."""

    async def run(request: RemotePrefillRequest, hand_over: HandOver, ask: Ask, ports: Sequence[int]) -> None:
        body = prefill_body(request, **fields)
        answer = await ask(request.path, body, request.request_id)
        taken = answer.get(hand_off)
        if not isinstance(taken, Mapping):
            raise TemporaryError(f"the engine's answer has no {hand_off}: it computed without handing off")
        await hand_over({hand_off: dict(taken)})

    return Prefilling(run)


def check_common(options: Options, engine: str, set_here: frozenset[str]) -> None:
    """Raise ConfigError for what no server engine takes: no model, a flag of ours, times that are none."""
    if not isinstance(options.get("model"), str) or not options["model"].strip():
        raise ConfigError(
            f"model is {options.get('model')!r}", hint=f"expected the model that {engine} serves"
        )
    for option in sorted(set_here & set(options)):
        if options[option] not in (None, False):
            raise ConfigError(
                f"{option} cannot be set with engine {engine}", hint="dynaplan sets it: leave it out"
            )
    WorkerSettings.from_options(options)


def check_two_names(options: Options, renamed: Mapping[str, str]) -> None:
    """Raise ConfigError where an option and the engine's own name for it say different things."""
    for option, name in renamed.items():
        if None not in (options.get(option), options.get(name)) and options[option] != options[name]:
            raise ConfigError(
                f"{option} is {options[option]!r} and {name} is {options[name]!r}",
                hint="they are two names of the same: keep one",
            )


def check_no_data_parallel(options: Options, engine: str) -> None:
    """Raise ConfigError for data parallel ranks, with an engine that has none within one server."""
    for name in DATA:
        if options.get(name) not in (None, 1):
            raise ConfigError(
                f"{name} is {options[name]!r}, but one worker of engine {engine} has one copy of the model",
                hint="leave it out, and set ServiceArgs.workers",
            )


def hub_token(options: Options) -> dict[str, str]:
    """The token for the Hugging Face hub, as a variable: everybody can read a command line."""
    return {"HF_TOKEN": str(options["hf-token"])} if options.get("hf-token") else {}


def loopback_transport(environ: Mapping[str, str]) -> dict[str, str]:
    """Keeps UCX, which moves KV entries for NIXL, from listening on the machine's network addresses.

    Nothing when ``environ`` says which devices it may use.
    """
    return {} if environ.get("UCX_NET_DEVICES") else {"UCX_NET_DEVICES": "lo"}


def command_words(value: Any, option: str) -> list[str]:
    """A command given as one text or as a list of words; [] when it is not given."""
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{option} is {value!r}: {error}", hint="expected a command line") from None
    if words is None:
        return []
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{option} is {value!r}", hint="expected a command: a text, or a list of words")
    return words


def real_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that this worker has; none of them simulated."""
    gpus = [gpu.strip() for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return [gpu for gpu in gpus if gpu and not gpu.startswith(("GPU-SIM-", "-"))]


def drain_deadline_s(options: Options, environ: Mapping[str, str]) -> float:
    """How long the worker's requests may take to finish when it leaves."""
    own = options.get("drain-deadline") or environ.get("DYNAPLAN_DRAIN_DEADLINE_S")
    return float(own or WorkerSettings.drain_deadline_s)
