"""A program that looks like ``aiperf`` 0.13.0 to who starts it, and asks nobody.

Copied from the real one: the names of the options that are used here, of its ``inputs-json`` and of what a
line of ``profile_export.jsonl`` holds; lines come in the order in which requests end; it ends with 0 though
requests failed; it has child processes for as long as it runs, and leaves directories behind.
``FAKE_AIPERF`` says what goes wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TTFT_MS, ITL_MS, START_NS = 100.0, 20.0, 1_795_278_912_985_847_826


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["profile"])
    for flag in ("--streaming", "--use-server-token-count", "--no-server-metrics", "--no-gpu-telemetry"):
        parser.add_argument(flag, action="store_true", required=True)
    texts = ("--model", "--url", "--endpoint-type", "--dataset-sampling-strategy", "--export-level", "--ui")
    paths = ("--tokenizer", "--input-file", "--artifact-dir")
    for name in (*texts, *paths, "--custom-dataset-type", "--request-timeout-seconds"):
        parser.add_argument(name, required=True)
    parser.add_argument("--request-count", type=int, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    return parser.parse_args()


def record(number: int, payload: dict[str, Any]) -> dict[str, Any]:
    output_tokens = payload["max_tokens"]
    metadata = {
        "session_num": number,
        "conversation_id": str(number),
        "request_start_ns": START_NS,
        "benchmark_phase": "profiling",
    }
    if os.environ.get("FAKE_AIPERF") == "refused":
        error = {"code": 404, "type": "Not Found", "message": "The model does not exist"}
        return {"metadata": metadata, "metrics": {}, "error": error}
    metrics = {
        "time_to_first_token": {"value": TTFT_MS, "unit": "ms"},
        "inter_chunk_latency": {"value": [ITL_MS] * (output_tokens - 1), "unit": "ms"},
        "usage_prompt_tokens": {"value": len(payload["prompt"]), "unit": "tokens"},
        "usage_completion_tokens": {"value": output_tokens, "unit": "tokens"},
        "usage_prompt_cache_read_tokens": {"value": 0, "unit": "tokens"},
    }
    return {"metadata": metadata, "metrics": metrics}


def main() -> None:
    given, wrong = options(), os.environ.get("FAKE_AIPERF")
    if not (Path(given.tokenizer) / "tokenizer.json").is_file():
        sys.exit("OSError: We couldn't connect to 'https://huggingface.co' to load the files")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as service:
        try:
            measure(given, wrong, service.pid)
        finally:
            service.kill()


def measure(given: argparse.Namespace, wrong: str | None, service_pid: int) -> None:
    directory = Path(given.artifact_dir)
    Path(tempfile.mkdtemp(), "dataset").touch()
    (directory / "service.pid").write_text(str(service_pid))
    if wrong == "fails":
        sys.exit("AIPerf System Exit Errors: out of memory")
    if wrong == "hangs":
        signal.pause()
    data = json.loads(Path(given.input_file).read_text())["data"]
    assert [session["session_id"] for session in data] == [str(n) for n in range(given.request_count)]
    records = [record(number, session["payloads"][0]) for number, session in enumerate(data)]
    lines = [json.dumps(each) for each in reversed(records)]
    (directory / "profile_export.jsonl").write_text("\n".join(lines[wrong == "forgets" :]) + "\n")


if __name__ == "__main__":
    main()
