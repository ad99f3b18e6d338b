"""vLLM: how to start it, what it says about itself, and how it hands KV entries over.

Flags and metric names are those of vLLM 0.32, older names beside them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dynaplan
from dynaplan.config.command_words import COMMAND, effective_options, words_of
from dynaplan.config.parallelism import TENSOR, data_parallel_size, tensor_parallel_size
from dynaplan.config.stock import WORKER
from dynaplan.engines.api_rules import (
    ANSWER_SCHEMAS,
    BOUNDED_FIELDS,
    SCHEMA,
    EngineApi,
    FieldRule,
    forbidden,
    integer,
    integers,
    string,
    strings,
)
from dynaplan.engines.model_files import DIRECTORY
from dynaplan.engines.port import EngineContext, HandOffReady
from dynaplan.engines.requirements import Requirement
from dynaplan.engines.server.engine_options import (
    FlagStyle,
    Options,
    check_common,
    drain_deadline_s,
    engine_flags,
    flag_style,
    hf_token_variable,
    memory_fraction,
    physical_gpus,
    removed_options,
    ucx_loopback_variable,
)
from dynaplan.engines.server.kind import Ask, LaunchLine, ServerKind, prefill_first
from dynaplan.engines.server.metrics import CounterNames, MetricNames
from dynaplan.engines.server.owners_command import check_engine_command, engine_line
from dynaplan.engines.server.sleep import SleepPaths
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.store.instances import host_of, is_loopback
from dynaplan.util.errors import ConfigError

log = logging.getLogger(__name__)

METRIC_NAMES = MetricNames(
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    kv_info=("vllm:cache_config_info",),
    prefix_hits=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    prefix_queries=("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    generated=("vllm:generation_tokens_total",),
    progress=(
        ("vllm:generation_tokens_total",),
        ("vllm:prompt_tokens_total",),
        ("vllm:iteration_tokens_total_count",),  # moves with every step, so in a long chunked prefill too
    ),
    counters=CounterNames(
        steps=("vllm:iteration_tokens_total_count",),
        generated=("vllm:generation_tokens_total",),
        prompt_tokens=("vllm:prompt_tokens_total",),
        cached_tokens=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        prompts=("vllm:time_to_first_token_seconds_count",),
    ),
    sleep_state=("vllm:engine_sleep_state",),
    samples=(
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:external_prefix_cache_queries_total",
        "vllm:external_prefix_cache_hits_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_sum",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:inter_token_latency_seconds_count",
        "vllm:time_per_output_token_seconds_sum",
        "vllm:time_per_output_token_seconds_count",
        "vllm:nixl_bytes_transferred_sum",
        "vllm:nixl_xfer_time_seconds_sum",
        "vllm:nixl_xfer_time_seconds_count",
        "vllm:nixl_num_failed_transfers_total",
        "vllm:nixl_num_kv_expired_reqs_total",
    ),
)

ASK_TO_HOLD = {
    "kv_transfer_params": {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
}
"""Compute the prompt and keep its KV blocks for another engine."""

MEMORY_FRACTION = 0.9
"""The part of a whole GPU's memory that vLLM takes by default, about."""

KV_SPACE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
"""The room for KV entries where there is no GPU, in whole GiB; without it vLLM measures what is free."""

PROCESSES_BYTES = 2 * 2**30
"""What its processes take beside weights and KV entries; 1.5 GB were seen with vLLM 0.32."""

DEV_MODE_VARIABLE = "VLLM_SERVER_DEV_MODE"
"""Without it the server has no paths for sleeping and waking; it listens on loopback and asks for the key."""

OLD_CONNECTOR = "DynamoNixlConnector"
"""The connector in configurations written for Dynamo: NIXL through a patch of vLLM that is gone."""

GUARD = "dynaplan_vllm_guard.Guard"
GUARD_DIRECTORY = Path(dynaplan.__file__).parent / "data" / "vllm"
"""A directory of its own on the path of vLLM's Python, which may be another one than ours."""

SET_HERE = frozenset({"host", "port", "api-key", "uds", "headless", "grpc", "disable-log-stats"})
"""Flags without which we could not reach the engine, or would not see its load."""

FLAGS = flag_style(
    "vllm",
    handled=(
        *("model", "served-model-name", "shutdown-timeout", *TENSOR, "middleware"),
        *("gpu-memory-utilization", "kv-transfer-config", "disable-uvicorn-access-log", *SET_HERE),
    ),
    also={"pp-size": "pipeline-parallel-size", "dp-size": "data-parallel-size"},
    negatable=frozenset(
        {
            *("enable-prefix-caching", "enable-chunked-prefill", "async-scheduling", "use-tqdm-on-load"),
            *("disable-hybrid-kv-cache-manager", "disable-cascade-attn", "enable-flashinfer-autotune"),
            *("enable-log-deltas", "scheduler-reserve-full-isl", "enable-batch-sharded-sampling"),
        }
    ),
)
"""``negatable`` are the flags that vLLM may have on by default."""


def _side_channel(options: Options, context: EngineContext) -> dict[str, str]:
    """Return where NIXL listens: on loopback, unless ``kv-network`` opens it to the worker's own network."""
    host = host_of(context.address).strip("[]")
    if options.get("kv-network") and host and not is_loopback(host):
        return {"VLLM_NIXL_SIDE_CHANNEL_HOST": host}
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", **ucx_loopback_variable(os.environ)}


def transfer_config(options: Options, context: EngineContext) -> Any:
    """Choose the way KV blocks move: the user's, else NIXL where the graph is disaggregated, else None.

    NIXL keeps the blocks in host memory where there is no GPU.
    """
    given = options.get("kv-transfer-config")
    if given is not None and OLD_CONNECTOR not in str(given):
        return given
    if context.role != "prefill" and not options.get("remote-prefill"):
        return None
    role = "kv_producer" if context.role == "prefill" else "kv_consumer"
    transfer = {"kv_connector": "NixlConnector", "kv_role": role}
    return transfer if physical_gpus(os.environ) else {**transfer, "kv_buffer_device": "cpu"}


def default_program() -> list[str]:
    """Find ``vllm serve`` in this Python environment or on PATH; the module where that command cannot work.

    The command reads the version of a package named vllm: without that (builds of another name) it ends at
    once.
    """
    beside = Path(sys.executable).with_name("vllm")
    if _is_package("vllm") and beside.exists():
        return [str(beside), "serve"]
    if _is_module("vllm"):
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [shutil.which("vllm") or "vllm", "serve"]


def _is_package(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _is_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _guard(options: Options, context: EngineContext) -> tuple[list[str], dict[str, str]]:
    """Return the flags and variables by which vLLM asks for the key on all paths.

    ``middleware: null`` leaves that to vLLM, which asks on some paths.
    """
    wanted = options.get("middleware", [])
    others = [wanted] if isinstance(wanted, str) else list(wanted or ())
    flags = [word for name in others for word in ("--middleware", str(name))]
    if not context.token:
        return flags, {}
    key = {"VLLM_API_KEY": context.token}
    if wanted is None:
        return flags, key
    paths = (str(GUARD_DIRECTORY), os.environ.get("PYTHONPATH", ""))
    # The last one is asked first.
    return [*flags, "--middleware", GUARD], {**key, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _shutdown(options: Options) -> list[str]:
    """The flag without which SIGTERM aborts and may leave streams hanging; null omits it (old versions)."""
    seconds = options.get("shutdown-timeout", round(drain_deadline_s(options, os.environ)))
    return [] if seconds is None else ["--shutdown-timeout", str(seconds)]


# -- vLLM: what is refused or bounded; it answers other wrong fields with 400 itself ---------------------
#
# One request has ended or halted releases of it: by a template (CVE-2025-61620, CVE-2025-62426), by
# embeddings in place of a prompt (CVE-2025-62164), by a wrong regular expression (vllm-project/vllm#19270).

MAX_GRAMMAR_LENGTH = 40_000
"""The length of a grammar or a list of choices as text."""

MAX_PATTERN_LENGTH = 8_192
"""The length of a regular expression."""


def _is_plain_template(value: object) -> bool:
    """Tell whether the arguments for the chat template leave the template and its tokenizing alone."""
    return (
        isinstance(value, dict) and SCHEMA.accepts(value) and not value.keys() & {"chat_template", "tokenize"}
    )


API = EngineApi(
    {
        **BOUNDED_FIELDS,
        **ANSWER_SCHEMAS,
        "prompt_logprobs": integer(-1, 100),
        "top_k": integer(-1, 2**31 - 1),
        "stop_token_ids": integers(4096),
        "allowed_token_ids": integers(1_000_000),
        "bad_words": strings(4096, 4096),
        "truncate_prompt_tokens": integer(-1, 2**31 - 1),
        "structured_outputs": SCHEMA,
        "guided_json": SCHEMA,
        "guided_choice": strings(4096, MAX_GRAMMAR_LENGTH),
        "guided_regex": string(MAX_PATTERN_LENGTH),
        "guided_grammar": string(MAX_GRAMMAR_LENGTH),
        "chat_template": forbidden("the model has its own; set chat-template for the worker"),
        "chat_template_kwargs": FieldRule(
            f"an object without chat_template and tokenize, {SCHEMA.expected}", _is_plain_template
        ),
        "prompt_embeds": forbidden("embeddings are not taken from clients"),
        "mm_processor_kwargs": forbidden("set mm-processor-kwargs for the worker"),
        "media_io_kwargs": forbidden("set media-io-kwargs for the worker"),
        "ec_transfer_params": forbidden("it is set by the server"),
    },
    death_marks=("EngineCore encountered an issue", "EngineDeadError"),
    continuation={"continue_final_message": True, "add_generation_prompt": False},
)


class VllmKind(ServerKind):
    name = "vllm"
    api = API
    model_kind = DIRECTORY
    requirement = Requirement("vllm", "vllm", "vllm-command", "vllm")
    needs_whole_context = True
    takes_given_memory = True
    moves_kv_between_hosts = True
    is_dynamo_backend = True
    metric_names = METRIC_NAMES
    parts = ("VLLM::", "multiprocessing.spawn")  # the engine's core: its server outlives it by some 5 s
    term_grace_s = 30.0  # idle, it took 4 to 14 s on busy machines
    prefills = True
    publishes_kv_events = True
    sleep_paths = SleepPaths(
        "/sleep",
        "/wake_up",
        "/resume",
        "/is_paused",
        'Set ServiceArgs.envs: {VLLM_SERVER_DEV_MODE: "1"} for the worker, or wake vLLM yourself.',
    )

    def check(self, options: Options, gpus: float) -> None:
        if options.get(COMMAND):
            check_engine_command(options, self.name)
            return
        check_common(options, "vllm", SET_HERE)
        tensor_parallel_size(options, gpus)
        words_of(options.get("vllm-command"), "vllm-command")
        transfer = WORKER["kv-transfer-config"]
        if not transfer.accepts(options.get("kv-transfer-config")):
            raise ConfigError(
                f"kv-transfer-config is {options['kv-transfer-config']!r}",
                hint=f"Expected {transfer.expected}.",
            )

    def command(self, options: Options, context: EngineContext, ports: Sequence[int]) -> LaunchLine:
        if options.get(COMMAND):
            return _line_of_owner(options, context, ports[0])
        for option, why in removed_options(options, FLAGS).items():
            log.warning("vLLM takes %s no more, it has no effect: %s", option, why)
        model, gpus = str(options["model"]), context.gpus
        program = words_of(options.get("vllm-command"), "vllm-command") or default_program()
        argv = [*program, *([model] if program[-1] == "serve" else ["--model", model])]
        argv += ["--host", "127.0.0.1", "--port", str(ports[0])]
        argv += ["--served-model-name", str(options.get("served-model-name") or model)]
        argv += _shutdown(options)
        if options.get("disable-uvicorn-access-log", True):
            argv += ["--disable-uvicorn-access-log"]  # we ask for its metrics once a second
        size = tensor_parallel_size(options, gpus)
        if size > 1:
            argv += ["--tensor-parallel-size", str(size)]
        if context.publishes_kv_events:
            from dynaplan.engines.server.block_events import publisher_config  # it imports ZMQ: 50 ms

            telling = publisher_config(context) | {"enable_kv_cache_events": True}
            argv += engine_flags({"kv-events-config": telling}, FlagStyle())
        fraction = options.get("gpu-memory-utilization") or memory_fraction(
            gpus, MEMORY_FRACTION, context.memory_fraction
        )
        if fraction is not None:
            argv += ["--gpu-memory-utilization", str(fraction)]
        transfer = transfer_config(options, context)
        guard, environment = _guard(options, context)
        argv += guard
        environment |= {"VLLM_NO_USAGE_STATS": "1", **hf_token_variable(options)}
        if options.get("enable-sleep-mode"):
            # On a CPU vLLM ends with an error of it, and in development mode ignores the order to sleep.
            argv += ["--enable-sleep-mode"] if physical_gpus(os.environ) else []
            environment[DEV_MODE_VARIABLE] = os.environ.get(DEV_MODE_VARIABLE, "1")
        if transfer is not None:
            argv += engine_flags({"kv-transfer-config": transfer}, FlagStyle())
            environment |= _side_channel(options, context)
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(ports[1])
        return LaunchLine((*argv, *engine_flags(options, FLAGS)), environment)

    def given_memory_bytes(self, environ: Mapping[str, str]) -> float:
        """Return its room for KV entries, and what its processes take beside that."""
        space = environ.get(KV_SPACE_VARIABLE, "")
        return int(space) * 2**30 + PROCESSES_BYTES if space.isdecimal() and int(space) else 0.0

    def ports_needed(self, options: Options, context: EngineContext) -> int:
        """Count the ports: HTTP, and for the KV transfer one per GPU (older versions bind one per rank)."""
        if transfer_config(options, context) is None:
            return 1
        return 1 + tensor_parallel_size(options, context.gpus) * data_parallel_size(options)

    async def prefill(
        self, request: RemotePrefillRequest, hand_off_ready: HandOffReady, ask: Ask, ports: Sequence[int]
    ) -> None:
        """Prefill first; vLLM keeps the blocks, and its answer says where."""
        await prefill_first(request, hand_off_ready, ask, "kv_transfer_params", ASK_TO_HOLD)


def _line_of_owner(options: Options, context: EngineContext, port: int) -> LaunchLine:
    """Return the owner's command, with the model's name for clients, and its share of a GPU with others.

    vLLM asks for the key on its own paths only: a guard would have to be found by the owner's Python.
    """
    added = [("--served-model-name", str(options.get("served-model-name") or options.get("model")))]
    if context.memory_fraction:
        added.append(("--gpu-memory-utilization", str(context.memory_fraction)))
    key = {"VLLM_API_KEY": context.token} if context.token else {}
    sleep = {DEV_MODE_VARIABLE: "1"} if effective_options(options).get("enable-sleep-mode") else {}
    return engine_line(options, port, added, {**key, **sleep})


KIND = VllmKind()
