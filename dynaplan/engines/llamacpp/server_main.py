"""Runs llama.cpp's HTTP server, from the xllamacpp package, in a process of its own.

``python -m dynaplan.engines.llamacpp.server_main 2 --port=40001 --model.path='"m.gguf"' ...`` is started
by a llama.cpp worker (``launch_line.py``). The first argument is the exit code for a model that fails
to load, every other one a field of ``xllamacpp.CommonParams`` and its value as JSON. The API key is in the
environment, as ``LLAMA_API_KEY``, because every user of the machine can read a command line.

Nothing here handles SIGTERM, so the kernel ends the process at once, also while xllamacpp's constructor
holds the GIL and loads the model. llama.cpp has nothing to save. Imports little, for a quick start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from enum import Enum
from functools import reduce
from typing import Any

EXIT_USAGE = 2
"""The exit code for a wrong command line."""

MAX_CODE_DIGITS = 3
"""Digits of an exit code."""


def main(words: Sequence[str]) -> int:
    """Serve until a signal ends the process; returns the exit code when the server cannot start."""
    import xllamacpp

    exit_unloaded, *fields = words or ("",)
    if not (exit_unloaded.isascii() and exit_unloaded.isdecimal() and len(exit_unloaded) <= MAX_CODE_DIGITS):
        print(f"the first word is {exit_unloaded!r}: expected an exit code", file=sys.stderr)
        return EXIT_USAGE
    params = xllamacpp.CommonParams()
    if key := os.environ.get("LLAMA_API_KEY"):
        params.api_keys = [key]
    for field in fields:
        name, _, value = field.removeprefix("--").partition("=")
        try:
            set_field(params, name, json.loads(value))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            print(f"llama.cpp does not take {field}: {error!r}", file=sys.stderr)
            return EXIT_USAGE
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        print(f"llama.cpp does not load {params.model.path}: {error}", file=sys.stderr)
        return int(exit_unloaded)
    while server:
        signal.pause()
    return 0


def set_field(params: Any, name: str, value: Any) -> None:
    """Set a field of ``CommonParams`` by its dotted name; a member of an enum is given by its name.

    Raises AttributeError for a field that does not exist, KeyError, TypeError, ValueError or OverflowError
    for a value that does not fit.
    """
    *path, last = name.split(".")
    owner = reduce(getattr, path, params)
    current = getattr(owner, last)
    if last.startswith("_") or callable(current):
        raise AttributeError(f"{name} is no field")
    is_member = isinstance(current, Enum) and isinstance(value, str)
    setattr(owner, last, type(current)[value] if is_member else value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
