"""Routing by prefix, with tokens: ours (``router: kv``) beside Dynamo's frontend with its KV router.

``python -m tests.bench data-path-kv``. Both cut prompts into tokens by the same small tokenizer and predict
what is cached; neither hears of KV events. Dynamo's (1.6.1) is measured where ``tox -e interop`` has fetched
it, or ``DYNAPLAN_DYNAMO_EVENTS_PYTHON`` names a Python that has it. Its workers speak a protocol of their own
(``dynamo_worker``), and it makes texts of their tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from dynaplan.util.sockets import free_port
from tests.bench import data_path
from tests.bench.data_path.workers import MODEL
from tests.bench.table import Row
from tests.fakes.tokenizers import byte_level_bpe, write_model

FETCHED = ".tox/interop/dynamo-events/bin"

STREAMS, TOKENS, STEP_MS = 16, 32, 5.0
READY_S = 5.0
"""Time in which our tokenizing process has read its model."""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 131072,
    "vocab_size": 800,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def rows(repeats: int) -> Iterator[Row]:
    """CPU per request of both, and one over the other."""
    with tempfile.TemporaryDirectory(prefix="dynaplan-bench-") as place, ExitStack() as stack:
        model = _write_model(Path(place, "model"))
        running = {"dynaplan": _start_ours(stack, model)}
        python = os.environ.get("DYNAPLAN_DYNAMO_EVENTS_PYTHON") or shutil.which("python", path=FETCHED)
        if python:
            running["Dynamo 1.6.1"] = _start_dynamo(stack, python, model, Path(place))
        time.sleep(READY_S)
        requests = STREAMS * round(1000 * data_path.MEASURED_S / (STEP_MS * TOKENS))
        found = data_path.measure_in_turns(running, STREAMS, TOKENS, requests, repeats)
    load = f"{STREAMS} streams of {TOKENS}"
    for name, measured in found.items():
        yield Row(f"{name}, by prefix: CPU per request, {load}", "ms", measured.cpu_ms)
    if other := found.get("Dynamo 1.6.1"):
        pairs = zip(found["dynaplan"].cpu_ms, other.cpu_ms, strict=True)
        yield Row(f"CPU over Dynamo's, by prefix, {load}", "x", [own / its for own, its in pairs], 1.0)


def _write_model(directory: Path) -> Path:
    write_model(directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["eos_token"] = config["eos_token"]["content"]  # Dynamo reads no object there
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def _start_ours(stack: ExitStack, model: Path) -> tuple[int, int | None]:
    port, workers = free_port(), [free_port(), free_port()]
    serve = (sys.executable, "-m", "tests.bench.data_path.workers", *map(str, workers), str(STEP_MS))
    stack.enter_context(data_path.program(serve))
    data_path.wait_for(workers[0])
    options = json.dumps({"router": "kv", "no-kv-events": True, "card": {"tokenizer": str(model)}})
    frontend = (sys.executable, "-m", "tests.bench.data_path.frontend", str(port), options)
    process = stack.enter_context(data_path.program((*frontend, *map(str, workers))))
    data_path.wait_for(port)
    return port, process.pid


def _start_dynamo(stack: ExitStack, python: str, model: Path, place: Path) -> tuple[int, int | None]:
    port, word = free_port(), byte_level_bpe().token_to_id("Ġthe")
    environment = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(place / "store"),
        "DYN_EVENT_PLANE": "zmq",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_LOG": "error",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    }
    worker = (python, str(Path(__file__).with_name("dynamo_worker.py")), str(model), MODEL, str(STEP_MS))
    frontend = (python, "-m", "dynamo.frontend", "--router-mode", "kv", "--no-router-kv-events")
    with mock.patch.dict(os.environ, environment):
        for _ in range(2):
            stack.enter_context(data_path.program((*worker, str(word))))
        listen_on = ("--http-host", "127.0.0.1", "--http-port", str(port))
        process = stack.enter_context(data_path.program((*frontend, *listen_on)))
    data_path.wait_for(port)
    return port, process.pid
