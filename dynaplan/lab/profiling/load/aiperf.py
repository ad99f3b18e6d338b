"""NVIDIA's ``aiperf`` as the load generator: our requests, sent and timed by it. Written for version 0.13.0.

It gets whole requests (``inputs-json``), not lengths: prompts are the same token ids that our own generator
sends, and the engine counts the tokens. Its records hold the time of each piece of each answer, so that ITL
is computed over the time in which all requests decode. aiperf's own mean over answers is not used.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from dynaplan.lab.profiling.deployment import tail
from dynaplan.lab.profiling.load.completions import REQUEST_TIMEOUT_S, Answer, CompletionClient, check
from dynaplan.lab.profiling.load.programs import run_program
from dynaplan.util.errors import PermanentError, TemporaryError

STARTING_S = 300.0
"""Seconds that aiperf may take beside its requests: importing takes some ten, on a busy box more."""

LAST_LINES = 12
"""The number of lines of aiperf's log that an error shows."""

MOST_REQUESTS = 10
"""TTFTs measured by one start of aiperf: as many as ``meters`` ever needs, since a start takes longer."""

RECORDS = "profile_export.jsonl"
"""The file of aiperf's records, one line for each request."""

SCRATCH = "dynaplan-aiperf-"
"""The beginning of the name of aiperf's temporary directory."""

OPTIONS = (
    *("--endpoint-type", "completions", "--streaming", "--use-server-token-count"),
    *("--custom-dataset-type", "inputs-json", "--dataset-sampling-strategy", "sequential"),
    *("--export-level", "records", "--ui", "none", "--no-server-metrics", "--no-gpu-telemetry"),
)
"""Options of aiperf that are the same for every run."""

TOKENIZER: Mapping[str, Mapping[str, Any]] = {
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"},
    },
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"},
}
"""A tokenizer of one word: aiperf loads one although it needs none, by default from a model hub."""

NOT_HANDED_DOWN = frozenset({"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"})
"""Environment variables with which aiperf 0.13.0 takes no tokenizer from a directory."""


class Aiperf:
    """A ``LoadGenerator``; ``client`` makes the requests, and primes.

    Each call starts aiperf, which takes some ten seconds. Inputs, records and log of the last call stay in
    ``directory``.
    """

    requests_at_a_time = MOST_REQUESTS

    def __init__(self, program: str, client: CompletionClient, directory: Path) -> None:
        self._program = program
        self._client = client
        self._directory = directory

    async def prime(self, prompt: Sequence[int]) -> None:
        """Have the prompt computed; not by aiperf, as nothing is measured."""
        await self._client.prime(prompt)

    async def answers(
        self, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int
    ) -> list[Answer]:
        """Return the answer to each prompt; raises PermanentError also when aiperf itself fails."""
        requests = [self._client.request(prompt, output_tokens) for prompt in prompts]
        try:
            self._write_inputs(requests)
        except OSError as error:
            raise PermanentError(f"{self._directory} cannot be written: {error.strerror}") from error
        await self._run(len(prompts), concurrency)
        answers = self._read_records(len(prompts))
        for answer, prompt in zip(answers, prompts, strict=True):
            check(answer, len(prompt), output_tokens)
        return answers

    def _write_inputs(self, requests: Sequence[Mapping[str, Any]]) -> None:
        tokenizer = self._directory / "tokenizer"
        tokenizer.mkdir(parents=True, exist_ok=True)
        for name, document in TOKENIZER.items():
            (tokenizer / name).write_text(json.dumps(document))
        sessions = [{"session_id": str(n), "payloads": [each]} for n, each in enumerate(requests)]
        (self._directory / "inputs.json").write_text(json.dumps({"data": sessions}))
        (self._directory / RECORDS).unlink(missing_ok=True)

    async def _run(self, requests: int, concurrency: int) -> None:
        log_path = self._directory / "aiperf.log"
        command = (self._program, "profile", *OPTIONS, *self._arguments(requests, concurrency))
        try:
            with tempfile.TemporaryDirectory(prefix=SCRATCH, ignore_cleanup_errors=True) as scratch_dir:
                environment = _environment(scratch_dir)
                code = await run_program(command, log_path, environment, REQUEST_TIMEOUT_S + STARTING_S)
        except TimeoutError:
            raise TemporaryError(
                f"aiperf has not ended within {REQUEST_TIMEOUT_S + STARTING_S:g} s"
            ) from None
        except OSError as error:
            raise PermanentError(f"aiperf cannot be started: {error}") from error
        if code:
            lines = "\n  ".join([f"the end of {log_path}:", *tail(log_path, LAST_LINES)])
            raise PermanentError(f"aiperf ended with exit code {code}", hint=lines)

    def _arguments(self, requests: int, concurrency: int) -> Iterator[str]:
        yield from ("--model", self._client.model, "--url", self._client.base_url)
        yield from ("--tokenizer", str((self._directory / "tokenizer").absolute()))
        yield from ("--input-file", str((self._directory / "inputs.json").absolute()))
        yield from ("--artifact-dir", str(self._directory.absolute()))
        yield from ("--request-count", str(requests), "--concurrency", str(concurrency))
        yield from ("--request-timeout-seconds", f"{REQUEST_TIMEOUT_S:g}")

    def _read_records(self, requests: int) -> list[Answer]:
        """Return the answers in the order of the requests; raises PermanentError when one is missing."""
        path = self._directory / RECORDS
        try:
            records = [json.loads(line) for line in path.read_text().splitlines()]
            answers = {int(each["metadata"]["conversation_id"]): answer_of(each) for each in records}
        except (OSError, ValueError, KeyError, TypeError) as error:
            hint = "Expected the records of aiperf 0.13."
            raise PermanentError(f"{path} cannot be read: {error!r}", hint=hint) from error
        if sorted(answers) != list(range(requests)) or len(records) != requests:
            raise PermanentError(f"aiperf has {len(records)} records of {requests} requests: {path}")
        return [answers[number] for number in range(requests)]


def _environment(scratch_dir: str) -> dict[str, str]:
    """Our environment, changed so that aiperf leaves no datasets and no directories of sockets behind."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_DOWN}
    return kept | {"TMPDIR": scratch_dir, "AIPERF_DATASET_MMAP_CACHE_ENABLED": "false"}


def answer_of(record: Mapping[str, Any]) -> Answer:
    """Read the answer in one line of ``profile_export.jsonl``.

    Raises PermanentError when it failed; KeyError, TypeError or ValueError when the line is something else.
    """
    error = record.get("error")
    if error:
        raise PermanentError(
            f"the deployment answered {error.get('code')}: {str(error.get('message'))[:500]}"
        )
    metrics = record["metrics"]
    sent_s = record["metadata"]["request_start_ns"] / 1e9
    first_s = sent_s + _milliseconds(metrics["time_to_first_token"]) / 1000.0
    between = metrics.get("inter_chunk_latency", {"value": [], "unit": "ms"})
    steps_s = [each / 1000.0 for each in _milliseconds(between)]
    cached = metrics.get("usage_prompt_cache_read_tokens", {"value": 0})
    return Answer(
        sent_s,
        tuple(accumulate(steps_s, initial=first_s)),
        int(metrics["usage_prompt_tokens"]["value"]),
        int(metrics["usage_completion_tokens"]["value"]),
        int(cached["value"]),
    )


def _milliseconds(metric: Mapping[str, Any]) -> Any:
    if metric["unit"] != "ms":
        raise ValueError(f"a time is in {metric['unit']!r}, expected ms")
    return metric["value"]
