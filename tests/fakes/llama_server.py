"""Stands in for the ``llama-server`` program: its flags, served by the same server out of xllamacpp.

Copied from the program: the flags, the key out of LLAMA_API_KEY, exit code 0 on SIGTERM when it is idle, an
exit code of 1 for a model that it cannot load or a flag that it does not know. Not copied: that SIGTERM
stalls it while it has requests.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path


def write_program(directory: Path) -> Path:
    """An executable file that runs this module."""
    program = directory / "llama-server"
    program.write_text(f"#!{sys.executable}\n{Path(__file__).read_text()}")
    program.chmod(0o755)
    return program


def main() -> int:
    import xllamacpp

    parser = argparse.ArgumentParser(exit_on_error=False)
    for name in ("model", "alias", "host", "slot-save-path", "chat-template"):
        parser.add_argument(f"--{name}", default="")
    for name in ("port", "ctx-size", "parallel", "threads", "threads-http", "batch-size"):
        parser.add_argument(f"--{name}", type=int, required=name != "threads")
    for name in ("metrics", "slots", "no-webui"):
        parser.add_argument(f"--{name}", action="store_true")
    try:
        flags, unknown = parser.parse_known_args()
    except argparse.ArgumentError as error:
        unknown = [str(error)]
    if unknown:
        print(f"error: invalid argument: {unknown[0]}", file=sys.stderr)
        return 1
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = flags.model, {flags.alias}
    params.hostnames, params.port = [flags.host], flags.port
    params.n_ctx, params.n_parallel, params.n_batch = flags.ctx_size, flags.parallel, flags.batch_size
    params.cpuparams.n_threads, params.n_threads_http = flags.threads, flags.threads_http
    params.endpoint_metrics, params.endpoint_slots, params.ui = flags.metrics, flags.slots, not flags.no_webui
    params.slot_save_path, params.verbosity = flags.slot_save_path, 2
    params.api_keys = [os.environ["LLAMA_API_KEY"]] if "LLAMA_API_KEY" in os.environ else []
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server
    return 0


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    sys.exit(main())
