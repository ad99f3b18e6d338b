"""SGLang: its own server as a child of the worker. Flags, metrics and protocol as SGLang 0.5.23 has them."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from dynaplan.config.command_words import COMMAND, words_of
from dynaplan.config.parallelism import TENSOR, tensor_parallel_size
from dynaplan.engines.api_rules import (
    ANSWER_SCHEMAS,
    BOUNDED_FIELDS,
    MAX_LOGPROBS,
    SCHEMA,
    EngineApi,
    forbidden,
    integer,
    integers,
    string,
    strings,
)
from dynaplan.engines.model_files import DIRECTORY, public_name
from dynaplan.engines.port import EngineContext, HandOffReady
from dynaplan.engines.requirements import Requirement
from dynaplan.engines.server.engine_options import (
    Options,
    check_common,
    engine_flags,
    flag_style,
    hf_token_variable,
    memory_fraction,
    merge_aliases,
    removed_options,
    ucx_loopback_variable,
)
from dynaplan.engines.server.kind import Ask, LaunchLine, ServerKind
from dynaplan.engines.server.metrics import CounterNames, MetricNames
from dynaplan.engines.server.owners_command import check_engine_command, engine_line
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.util.errors import ConfigError

log = logging.getLogger(__name__)

TRANSFER_BACKEND = "disaggregation-transfer-backend"
DEFAULT_TRANSFER_BACKEND = "nixl"
"""Not SGLang's own default, mooncake, which wants InfiniBand: NIXL uses what one box has."""

WHOLE_GPU = 0.88
"""The memory fraction of a whole GPU, of which a worker with a part of one gets that part."""

ROOM_BITS = 62
"""Rooms are positive 64-bit numbers, and a request with n answers takes n of them, beginning here."""

SET_HERE = frozenset(
    {
        *("host", "port", "nccl-port", "api-key", "config"),
        *("disaggregation-mode", "disaggregation-bootstrap-port"),
    }
)
"""Flags without which we could not reach the engine. SGLang reads one ``--config`` file: it holds the key."""

STYLE = flag_style(
    "sglang",
    handled=(
        *(*TENSOR, "model", "served-model-name", "enable-metrics", TRANSFER_BACKEND, *SET_HERE),
        *("enable-prefix-caching", "enable-chunked-prefill", "max-num-batched-tokens"),
    ),
)

METRIC_NAMES = MetricNames(
    running=("sglang:num_running_reqs",),
    waiting=("sglang:num_queue_reqs",),
    waiting_besides=(
        "sglang:num_grammar_queue_reqs",
        "sglang:num_prefill_bootstrap_queue_reqs",
        "sglang:num_prefill_inflight_queue_reqs",
        "sglang:num_decode_prealloc_queue_reqs",
        "sglang:num_decode_transfer_queue_reqs",
    ),
    kv_usage=("sglang:token_usage", "sglang:full_token_usage"),
    kv_active=("sglang:num_used_tokens", "sglang:kv_used_tokens"),
    kv_total=("sglang:max_total_num_tokens",),
    prefix_hit_rate=("sglang:cache_hit_rate",),
    # the first moves with every step, the other only when a request ends
    generated=("sglang:generation_tokens_total",),
    progress=(("sglang:realtime_tokens_total",), ("sglang:generation_tokens_total",)),
    counters=CounterNames(
        generated=("sglang:realtime_tokens_total",),
        prompt_tokens=("sglang:realtime_tokens_total",),
        prompts=("sglang:time_to_first_token_seconds_count",),
        mode_label="mode",
    ),
    samples=(
        *("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "sglang:cache_hit_rate"),
        *("sglang:gen_throughput", "sglang:num_used_tokens", "sglang:max_total_num_tokens"),
        *("sglang:num_retracted_reqs", "sglang:num_transfer_failed_reqs_total"),
        *("sglang:prompt_tokens_total", "sglang:generation_tokens_total", "sglang:cached_tokens_total"),
        *("sglang:time_to_first_token_seconds_sum", "sglang:time_to_first_token_seconds_count"),
        *("sglang:inter_token_latency_seconds_sum", "sglang:inter_token_latency_seconds_count"),
    ),
)


def served_name(options: Options) -> str:
    """Return the model's name for clients: ``served-model-name``, else the last part of its path."""
    model = str(options.get("model") or "")
    return str(options.get("served-model-name") or public_name("sglang", model) or model)


# -- SGLang: what is refused or bounded; all other fields are its own affair ----------------------------
#
# From one request, its scheduler and so the whole server ended over ``top_logprobs`` above the vocabulary
# (sgl-project/sglang#40076), ``n`` in millions and token ids beyond the vocabulary
# (sgl-project/sglang#36856).

_SET_BY_SGLANG = forbidden("it is set by the server")

API = EngineApi(
    {
        **BOUNDED_FIELDS,
        **ANSWER_SCHEMAS,
        "top_logprobs_num": integer(0, MAX_LOGPROBS),
        "top_k": integer(-1, 2**31 - 1),
        "stop_token_ids": integers(4096),
        "stop_regex": strings(16, 1024),
        "regex": string(8_192),
        "ebnf": string(40_000),
        "json_schema": string(100_000),
        "chat_template_kwargs": SCHEMA,
        "custom_logit_processor": forbidden("code is not taken from clients"),
        "input_embeds": forbidden("embeddings are not taken from clients"),
        "session_params": _SET_BY_SGLANG,
        "data_parallel_rank": _SET_BY_SGLANG,
        "routed_dp_rank": _SET_BY_SGLANG,
        "disagg_prefill_dp_rank": _SET_BY_SGLANG,
        "return_hidden_states": forbidden("hidden states are not given to clients"),
    },
    death_marks=("Scheduler hit an exception",),
    continuation={"continue_final_message": True},
)


class SglangKind(ServerKind):
    name = "sglang"
    api = API
    model_kind = DIRECTORY
    requirement = Requirement("sglang", "sglang", "sglang-command", "sglang")
    counts_kv_in_tokens = True
    takes_given_memory = True
    is_dynamo_backend = True
    metric_names = METRIC_NAMES
    parts = ("sglang::", "multiprocessing.spawn")
    ready_path = "/health"  # 503 until the warm-up request is answered; /ready is newer
    term_grace_s = 30.0  # it checks every 5 s for SIGTERM, then ends its schedulers
    prefills = True
    publishes_kv_events = True
    holds_hand_offs = False

    def check(self, options: Options, gpus: float) -> None:
        if options.get(COMMAND):
            check_engine_command(options, self.name)
            return
        check_common(options, "sglang", SET_HERE)
        words_of(options.get("sglang-command"), "sglang-command")
        tensor_parallel_size(options, gpus)
        if ":" in served_name(options):
            raise ConfigError(
                f"served-model-name is {served_name(options)!r}",
                hint="Expected a name without ':', which SGLang keeps for adapters. Set served-model-name.",
            )
        if options.get("remote-prefill") and options.get("conditional-disagg"):
            raise ConfigError(
                "conditional-disagg is true, but a decode worker of SGLang cannot compute a prompt itself",
                hint="Set conditional-disagg: false, and max-prefill-queue-size high enough never to be "
                "reached.",
            )
        merge_aliases(options, STYLE.renamed)

    def command(self, options: Options, context: EngineContext, ports: Sequence[int]) -> LaunchLine:
        """Build the command line. ``ports``: HTTP, NCCL, and for a prefill worker the bootstrap server's."""
        if options.get(COMMAND):
            return _line_of_owner(options, context, ports[0])
        for option, why in removed_options(options, STYLE).items():
            log.warning("SGLang does not take %s, it has no effect: %s", option, why)
        files = _key_file(context)
        argv = (
            *_program(options),
            *(word for path in files for word in ("--config", str(path))),
            *("--model-path", str(options.get("model") or "")),
            *("--served-model-name", served_name(options)),
            *("--host", "127.0.0.1", "--port", str(ports[0]), "--nccl-port", str(ports[1])),
            *("--tp-size", str(tensor_parallel_size(options, context.gpus)), "--enable-metrics"),
            *_disaggregation(options, context, ports),
            *(() if "log-level-http" in options else ("--log-level-http", "warning")),  # we ask every second
            *_memory(options, context.gpus, context.memory_fraction),
            *_scheduling(options),
            *_telling(context),
            *engine_flags(options, STYLE),
        )
        return LaunchLine(argv, _environment(options), files)

    def ports_needed(self, options: Options, context: EngineContext) -> int:
        """Count the ports: HTTP and NCCL, and the bootstrap server of a prefill worker."""
        return 3 if context.role == "prefill" else 2

    def no_prefix_cache_reason(self, options: Options) -> str:
        is_off = options.get("enable-prefix-caching") is False or options.get("disable-radix-cache")
        return "its radix cache is off" if is_off else ""

    async def prefill(
        self, request: RemotePrefillRequest, hand_off_ready: HandOffReady, ask: Ask, ports: Sequence[int]
    ) -> None:
        """Work on both sides at once: tell the decode worker where to meet, then compute.

        SGLang answers when the KV entries have been transferred, so nothing is held after that.
        """
        fields = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": ports[2],
            "bootstrap_room": secrets.randbits(ROOM_BITS),
        }
        body = {key: value for key, value in request.body.items() if key != "stream_options"}
        await hand_off_ready(fields)
        await ask(request.path, {**body, "stream": False, **fields}, request.request_id)

    def requires_remote_prefill(self, options: Options, context: EngineContext) -> bool:
        """Return True for a decode worker beside prefill workers: it cannot compute a prompt itself."""
        return context.role != "prefill" and bool(options.get("remote-prefill"))


def _line_of_owner(options: Options, context: EngineContext, port: int) -> LaunchLine:
    """Return the owner's command, with metrics, and without a key: that would be on the command line."""
    added = [
        ("--served-model-name", served_name(options)),
        ("--enable-metrics",),
        ("--log-level-http", "warning"),  # we ask every second
    ]
    if context.memory_fraction:
        added.append(("--mem-fraction-static", f"{context.memory_fraction:g}"))
    return engine_line(options, port, added, {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"})


KIND = SglangKind()


def _program(options: Options) -> Sequence[str]:
    """Find the words before the flags; SGLang may live in an environment of its own."""
    given = words_of(options.get("sglang-command"), "sglang-command")
    if given:
        return given
    if find_spec("sglang"):
        return sys.executable, "-m", "sglang.launch_server"
    return shutil.which("sglang") or "sglang", "serve"


def _key_file(context: EngineContext) -> Mapping[Path, str]:
    """The API key as a configuration file: everybody can read a command line, and it takes no variable."""
    import yaml

    if not context.token:
        return {}
    directory = Path(context.scratch_dir or tempfile.gettempdir())
    return {directory / f"{context.worker_name}.sglang.yaml": yaml.safe_dump({"api-key": context.token})}


def _telling(context: EngineContext) -> Sequence[str]:
    if not context.publishes_kv_events:
        return ()
    from dynaplan.engines.server.block_events import publisher_config  # it imports ZMQ: 50 ms

    return engine_flags({"kv-events-config": publisher_config(context)}, STYLE)


def _environment(options: Options) -> Mapping[str, str]:
    return {
        **hf_token_variable(options),
        **ucx_loopback_variable(os.environ),
        # else every look at /health generates a token
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # where both sides of a transfer meet: not on the network, they ask nobody for a key
        "SGLANG_HOST_IP": os.environ.get("SGLANG_HOST_IP") or "127.0.0.1",
    }


def _disaggregation(options: Options, context: EngineContext, ports: Sequence[int]) -> Sequence[str]:
    is_prefill = context.role == "prefill"
    if not is_prefill and not options.get("remote-prefill"):
        return ()
    return (
        *("--disaggregation-mode", "prefill" if is_prefill else "decode"),
        *(("--disaggregation-bootstrap-port", str(ports[2])) if is_prefill else ()),
        *(
            "--disaggregation-transfer-backend",
            str(options.get(TRANSFER_BACKEND) or DEFAULT_TRANSFER_BACKEND),
        ),
    )


def _memory(options: Options, gpus: float, given: float) -> Sequence[str]:
    is_given = any(options.get(key) is not None for key in ("gpu-memory-utilization", "mem-fraction-static"))
    fraction = None if is_given else memory_fraction(gpus, WHOLE_GPU, given)
    return () if fraction is None else ("--mem-fraction-static", f"{fraction:g}")


def _scheduling(options: Options) -> Sequence[str]:
    """Translate vLLM's token budget of a step: a chunk where prompts are chunked, else a batch."""
    is_chunked = options.get("enable-chunked-prefill") is not False
    budget = options.get("max-num-batched-tokens")
    flag = "--chunked-prefill-size" if is_chunked else "--max-prefill-tokens"
    return (
        *(() if is_chunked else ("--chunked-prefill-size", "-1")),
        *(() if budget is None else (flag, str(budget))),
        *(("--disable-radix-cache",) if options.get("enable-prefix-caching") is False else ()),
    )
