"""llama.cpp as an engine kind: its command lines, its signals, how it is told to end."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from dynaplan.engines.common.kinds import EXIT_USAGE, EngineKind, LaunchLine, Options, real_gpus
from dynaplan.engines.common.requirements import check_installed
from dynaplan.engines.common.signals import SignalNames
from dynaplan.engines.context import EngineContext
from dynaplan.engines.llamacpp.options import LlamaOptions, fields, read_options, server_flags

CHILD = "dynaplan.engines.llamacpp.child"
"""The module of our own program, which serves with the xllamacpp package."""

EXIT_TRY_AGAIN = 1
"""The exit code for a model that may load later: a GPU's memory may be about to be freed."""

VERBOSITY = 1
"""llama.cpp's level for errors: two warnings come with every prompt that was prefilled elsewhere."""

SIGNALS = SignalNames(
    running=("llamacpp:requests_processing",),
    waiting=("llamacpp:requests_deferred",),
    generated=("llamacpp:tokens_predicted_total",),
    progress=(
        ("llamacpp:n_decode_total",),  # moves with every step, so within a long prompt too
        ("llamacpp:tokens_predicted_total",),
        ("llamacpp:prompt_tokens_total",),
    ),
    samples=(
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        "llamacpp:prompt_tokens_total",
        "llamacpp:prompt_tokens_cached_total",
        "llamacpp:prompt_seconds_total",
        "llamacpp:tokens_predicted_total",
        "llamacpp:tokens_predicted_seconds_total",
        "llamacpp:n_decode_total",
        "llamacpp:n_busy_slots_per_decode",
    ),
)


def check(options: Options, gpus: float) -> None:
    """Raise ConfigError for a wrong option, and when neither the package nor the program is installed."""
    checked = read_options(options, gpus)
    check_installed("llamacpp", {"llama-server": checked.server})


def command(options: Options, context: EngineContext, ports: Sequence[int]) -> LaunchLine:
    """Build the command line of the named llama-server, else of our program, else of PATH's llama-server."""
    checked = read_options(options, context.gpus)
    program = _program(checked.server)
    # llama.cpp puts a file's name right behind the directory's.
    slots = context.scratch_dir.rstrip("/") + "/" if context.scratch_dir else ""
    if program:
        argv = _server_words(program, checked, ports[0], slots)
    else:
        argv = _child_words(checked, ports[0], slots)
    key = {"LLAMA_API_KEY": context.token} if context.token else {}
    # Else a crash would start a debugger on the process, if there is one.
    backtrace = {"GGML_NO_BACKTRACE": os.environ.get("GGML_NO_BACKTRACE", "1")}
    return LaunchLine(argv, {**key, **backtrace, **checked.environment})


def _program(named: str) -> str:
    """Find the llama-server program to run; empty for our own."""
    if named:
        return str(Path(named).expanduser())
    return "" if importlib.util.find_spec("xllamacpp") else shutil.which("llama-server") or "llama-server"


def _child_words(options: LlamaOptions, port: int, slots: str) -> tuple[str, ...]:
    ours = {
        "hostnames": ["127.0.0.1"],
        "port": port,
        "endpoint_metrics": True,
        "endpoint_slots": True,
        "ui": False,
        "verbosity": VERBOSITY,
        "slot_save_path": slots,
    }
    words = (f"--{name}={json.dumps(value)}" for name, value in {**ours, **fields(options)}.items())
    exit_unloaded = EXIT_TRY_AGAIN if real_gpus(os.environ) else EXIT_USAGE
    return sys.executable, "-m", CHILD, str(exit_unloaded), *words


def _server_words(program: str, options: LlamaOptions, port: int, slots: str) -> tuple[str, ...]:
    return (
        *(program, "--host", "127.0.0.1", "--port", str(port), "--metrics", "--slots", "--no-webui"),
        *(("--slot-save-path", slots) if slots else ()),
        *server_flags(options),
    )


KIND = EngineKind(
    name="llamacpp",
    command=command,
    check=check,
    signals=SIGNALS,
    metrics_timeout_s=4.0,
    term_grace_s=5.0,  # idle, it ends in milliseconds
    stalls_on_term=True,
    address_in_use=("couldn't bind HTTP server socket",),
    request_slots=lambda options: read_options(options, 0).slots,
    measures_memory=False,
)
