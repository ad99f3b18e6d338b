"""TensorRT-LLM: ``trtllm-serve`` as a child of the worker. Flags, metrics, protocol as in its source of 2026.

It takes no API key: every process of this machine may ask it.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynaplan.config.command_words import words_of
from dynaplan.config.parallelism import DATA, TENSOR, tensor_parallel_size
from dynaplan.engines.api_rules import (
    ANSWER_SCHEMAS,
    BOUNDED_FIELDS,
    SCHEMA,
    EngineApi,
    forbidden,
    integer,
    integers,
    strings,
)
from dynaplan.engines.model_files import DIRECTORY
from dynaplan.engines.port import EngineContext, HandOffReady
from dynaplan.engines.requirements import Requirement
from dynaplan.engines.server.engine_options import (
    Options,
    check_common,
    check_no_data_parallel,
    engine_flags,
    flag_style,
    hf_token_variable,
    memory_fraction,
    merge_aliases,
    removed_options,
)
from dynaplan.engines.server.kind import Ask, LaunchLine, ServerKind, prefill_body
from dynaplan.engines.server.metrics import MetricNames
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.util.errors import ConfigError, TemporaryError

log = logging.getLogger(__name__)

EXTRA = "extra-llm-api-options"
HAND_OFF = "disaggregated_params"

WHOLE_GPU = 0.9
"""The part of what the weights leave free that the KV cache of a whole GPU takes."""

FIRST_SHARED_ID = 1 << 40
"""Below it are the ids that each server counts for itself; those of hand-offs are from here to 2**63."""

MORE_TO_COME = frozenset({"length", "not_finished"})
"""Finish reasons of a prefilled request whose answer has more than one token."""

SET_HERE = frozenset({"host", "port", "config", "server-role", "metadata-server-config-file"})
"""Flags without which we could not reach the engine, or that bring in another router."""

IN_FILE: Mapping[str, tuple[str, str]] = {
    "gpu-memory-utilization": ("kv_cache_config", "free_gpu_memory_fraction"),
    "free-gpu-memory-fraction": ("kv_cache_config", "free_gpu_memory_fraction"),
    "kv-cache-free-gpu-memory-fraction": ("kv_cache_config", "free_gpu_memory_fraction"),
    "block-size": ("kv_cache_config", "tokens_per_block"),
    "enable-prefix-caching": ("kv_cache_config", "enable_block_reuse"),
    "kv-cache-dtype": ("kv_cache_config", "dtype"),
}
"""Options that go into the file: where it has a ``kv_cache_config``, the flags for it may not count."""

STYLE = flag_style(
    "trtllm",
    handled=(
        *(*TENSOR, *DATA, "model", "served-model-name", "backend", EXTRA, "dtype"),
        *(*IN_FILE, *SET_HERE),
    ),
    separator="_",
)

METRIC_NAMES = MetricNames(
    running=("trtllm_num_requests_running",),
    waiting=("trtllm_num_requests_waiting",),
    kv_usage=("trtllm_kv_cache_utilization", "kv_cache_utilization"),
    kv_active=("trtllm_kv_cache_used_blocks",),
    kv_total=("trtllm_kv_cache_max_blocks",),
    prefix_hit_rate=("trtllm_kv_cache_hit_rate", "kv_cache_hit_rate"),
    generated=("trtllm_generation_tokens_total",),
    samples=(
        *("trtllm_num_requests_running", "trtllm_num_requests_waiting", "trtllm_kv_cache_utilization"),
        *("trtllm_kv_cache_used_blocks", "trtllm_kv_cache_max_blocks", "trtllm_kv_cache_hit_rate"),
        *("trtllm_num_context_requests", "trtllm_num_generation_requests"),
        *("trtllm_prompt_tokens_total", "trtllm_generation_tokens_total", "trtllm_request_success_total"),
        *("trtllm_time_to_first_token_seconds_sum", "trtllm_time_to_first_token_seconds_count"),
        *("trtllm_time_per_output_token_seconds_sum", "trtllm_time_per_output_token_seconds_count"),
    ),
)
"""No ``progress``: the server brings these values up to date when a request ends, and then as long as steps
follow each other. So values that stand still may mean a long answer as well as a standstill."""


def llm_api_options(options: Options, context: EngineContext) -> dict[str, Any]:
    """Compose the file: metrics, the KV cache, the hand-off, and over them the section's own options."""
    built: dict[str, Any] = {"return_perf_metrics": True, "enable_iter_perf_stats": True}
    fraction = memory_fraction(context.gpus, WHOLE_GPU, context.memory_fraction)
    if fraction is not None:
        built["kv_cache_config"] = {"free_gpu_memory_fraction": fraction}
    for option, (group, key) in IN_FILE.items():
        if options.get(option) is not None:
            built.setdefault(group, {})[key] = options[option]
    if options.get("dtype") is not None:
        built["dtype"] = options["dtype"]
    if context.role == "prefill" or options.get("remote-prefill"):
        buffer = {"max_tokens_in_buffer": options["max-model-len"]} if options.get("max-model-len") else {}
        built["cache_transceiver_config"] = {"backend": "DEFAULT", **buffer}
    if context.role == "prefill":
        built["disable_overlap_scheduler"] = True  # not supported by servers that only prefill
    return _merged(built, _extra(options))


# -- TensorRT-LLM: what is refused or bounded; all other fields are its own affair ----------------------

API = EngineApi(
    {
        **BOUNDED_FIELDS,
        **ANSWER_SCHEMAS,
        "prompt_logprobs": integer(0, 100),
        "top_k": integer(-1, 2**31 - 1),
        "stop_token_ids": integers(4096),
        "bad": strings(4096, 4096),
        "beam_width": integer(1, 16),
        "guided_decoding": SCHEMA,
        "chat_template": forbidden("the model has its own"),
        "chat_template_kwargs": SCHEMA,
        "mm_processor_kwargs": forbidden("they are not taken from clients"),
        "lora_request": forbidden("it names files of the server"),
        "conversation_params": forbidden("it is set by the server"),
    },
    death_marks=("RequestError: executor", "The executor has been shut down"),
)


class TrtllmKind(ServerKind):
    name = "trtllm"
    api = API
    model_kind = DIRECTORY
    requirement = Requirement("tensorrt_llm", "trtllm-serve", "trtllm-command", "tensorrt-llm")
    takes_given_memory = True
    is_dynamo_backend = True
    metric_names = METRIC_NAMES
    metrics_path = "/prometheus/metrics"
    term_grace_s = 30.0
    prefills = True
    reports_requests = False
    accepts_any_model = True  # it ignores a request's model

    def check(self, options: Options, gpus: float) -> None:
        check_common(options, "trtllm", SET_HERE)
        words_of(options.get("trtllm-command"), "trtllm-command")
        tensor_parallel_size(options, gpus)
        check_no_data_parallel(options, "trtllm")
        _extra(options)
        merge_aliases(options, STYLE.renamed)

    def command(self, options: Options, context: EngineContext, ports: Sequence[int]) -> LaunchLine:
        """Build the command line, and the file of LLM API options for what is no flag."""
        import yaml

        for option, why in removed_options(options, STYLE).items():
            log.warning("TensorRT-LLM does not take %s, it has no effect: %s", option, why)
        directory = Path(context.scratch_dir or tempfile.gettempdir())
        file = directory / f"{context.worker_name}.trtllm.yaml"
        program = words_of(options.get("trtllm-command"), "trtllm-command")
        argv = (
            *(program or [shutil.which("trtllm-serve") or "trtllm-serve"]),
            str(options["model"]),
            *(
                "--host",
                "127.0.0.1",
                "--port",
                str(ports[0]),
                "--backend",
                str(options.get("backend") or "pytorch"),
            ),
            *("--tp_size", str(tensor_parallel_size(options, context.gpus))),
            *("--extra_llm_api_options", str(file)),
            *engine_flags(options, STYLE),
        )
        return LaunchLine(
            argv, hf_token_variable(options), files={file: yaml.safe_dump(llm_api_options(options, context))}
        )

    async def prefill(
        self, request: RemotePrefillRequest, hand_off_ready: HandOffReady, ask: Ask, ports: Sequence[int]
    ) -> None:
        """Prefill first; the answer's parameters let the decode side fetch the KV entries.

        Raises TemporaryError when there is nothing to hand over: the decode side does it all then.
        """
        shared_id = FIRST_SHARED_ID + secrets.randbelow((1 << 63) - FIRST_SHARED_ID)
        asked = {"request_type": "context_only", "disagg_request_id": shared_id}
        body = prefill_body(request, **{HAND_OFF: asked})
        if "max_completion_tokens" in body:
            del body["max_tokens"]  # two names of one field here, and both at once are refused
        answer = await ask(request.path, body, request.request_id)
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        taken = choice.get(HAND_OFF)
        if not isinstance(taken, Mapping) or taken.get("ctx_request_id") is None:
            raise TemporaryError(f"the engine's answer has no {HAND_OFF}: it computed without handing off")
        if str(choice.get("finish_reason")) not in MORE_TO_COME:
            raise TemporaryError("the answer ends with its first token: there is nothing to hand over")
        await hand_off_ready(
            {HAND_OFF: {**taken, "request_type": "generation_only", "disagg_request_id": shared_id}}
        )


KIND = TrtllmKind()


def _extra(options: Options) -> Mapping[str, Any]:
    """Read the section's own options for the file: a mapping, or its JSON text."""
    given = options.get(EXTRA) or {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = None
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{EXTRA} is {options[EXTRA]!r}",
            hint="Expected a mapping: what would stand in that file, written here instead.",
        )
    return given


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``above`` over ``below``, mappings within them too."""
    merged = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            merged[key] = _merged(below[key], above[key])
    return merged
