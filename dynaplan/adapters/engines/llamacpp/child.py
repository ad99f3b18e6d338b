"""Runs llama.cpp's HTTP server, out of the xllamacpp package, in a process of its own.

A llama.cpp worker starts it: ``python -m dynaplan.adapters.engines.llamacpp.child --port=N --model="M" ...``.
Every word is ``--name=JSON``; ``command`` in ``kind.py`` writes them. The API key is in the environment, as
``LLAMA_API_KEY``: everybody can read a command line.

Nothing here handles SIGTERM, so the kernel ends the process at once, also while xllamacpp's constructor
holds Python's lock and loads the model. llama.cpp has nothing to save.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from dynaplan.adapters.engines.common.kinds import EXIT_USAGE, real_gpus
from dynaplan.adapters.engines.llamacpp.options import LlamaOptions, set_fields
from dynaplan.domain.errors import ConfigError

EXIT_TRY_AGAIN = 1
"""The exit code for a model that may load later: a GPU's memory may be about to be freed."""

VERBOSITY = 1
"""llama.cpp's level for errors: two warnings come with every prompt that was prefilled elsewhere."""


def main(words: Sequence[str]) -> int:
    """Serve until a signal ends the process; the exit code when the server cannot start."""
    import xllamacpp

    given = {
        name.removeprefix("--"): json.loads(value) for name, _, value in (w.partition("=") for w in words)
    }
    try:
        params = _params(given, xllamacpp)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        print(f"llama.cpp does not load {params.model.path}: {error}", file=sys.stderr)
        return EXIT_TRY_AGAIN if real_gpus(os.environ) else EXIT_USAGE
    while server:
        signal.pause()
    return 0


def _params(given: dict[str, Any], xllamacpp: Any) -> Any:
    """Translate the command line into llama.cpp's parameters."""
    params = xllamacpp.CommonParams()
    params.hostnames, params.port = ["127.0.0.1"], given.pop("port")
    params.endpoint_metrics = params.endpoint_slots = True
    params.ui = False
    params.verbosity = VERBOSITY
    params.slot_save_path = given.pop("slot-save-path")
    if key := os.environ.get("LLAMA_API_KEY"):
        params.api_keys = [key]
    set_fields(params, LlamaOptions.from_words(given), xllamacpp)
    return params


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
