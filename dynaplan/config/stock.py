"""The keys that each stock service's section knows, and what engines make of those of a worker.

Of a real engine's options only some are declared here: to check their types, and what became of old ones. An
engine has more than these; what is not known here goes to it as it is (docs/decisions/0016).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dynaplan.config.settings.fields import REAL_ENGINES, Option, Options, Settings, Size, option, options_of
from dynaplan.config.settings.frontend import (
    ComponentSettings,
    DisaggregationSettings,
    FrontendSettings,
    ProcessorSettings,
    RouterSettings,
    RoutingSettings,
)
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.config.settings.worker import (
    SIMULATED,
    CommandSettings,
    EngineOptions,
    ModelSettings,
    ProcessSettings,
    SimulationOptions,
    WorkerSettings,
)

_NO_MORE = "vLLM has it no more"


@dataclass(init=False, repr=False, eq=False)
class VllmOptions(Settings):
    """Options by vLLM's names; other engines have some of them under names of their own."""

    dtype: str | None = option(None, "Type of weights and activations")
    quantization: str | None = option(None, "Method of quantization")
    tokenizer: str | None = option(
        None, "Tokenizer, when it is not the model's", names={"sglang": ("tokenizer-path",)}
    )
    trust_remote_code: bool | None = option(None, "Run code that comes with the model")
    pipeline_parallel_size: int | None = option(
        None, "GPUs that the layers are divided between", minimum=1, names={"trtllm": ("pp-size",)}
    )
    gpu_memory_utilization: float | None = option(
        None, "Part of the GPU's memory to use", minimum=0, names={"sglang": ("mem-fraction-static",)}
    )
    swap_space: float | None = option(
        None,
        "GiB of host memory per GPU for swapped KV blocks",
        minimum=0,
        removed={"vllm": _NO_MORE, "sglang": "SGLang has none", "trtllm": "trtllm-serve has none"},
    )
    cpu_offload_gb: float | None = option(
        None,
        "GiB of weights per GPU kept in host memory",
        minimum=0,
        removed={"trtllm": "trtllm-serve has none"},
    )
    enforce_eager: bool | None = option(
        None,
        "No CUDA graphs",
        names={"sglang": ("disable-cuda-graph",)},
        removed={"trtllm": "it is vLLM's; set cuda_graph_config: null in extra-llm-api-options"},
    )
    enable_chunked_prefill: bool | None = option(None, "Divide prompts over several steps")
    kv_transfer_config: Mapping[str, Any] | None = option(
        None,
        "How KV blocks move between workers",
        removed={
            "sglang": "it is vLLM's; SGLang's are the disaggregation- options",
            "trtllm": "it is vLLM's; TensorRT-LLM's is cache_transceiver_config",
        },
    )
    hf_token: Any = option(
        None, "Token for the Hugging Face hub; the engine gets it in its environment", is_flag=False
    )


@dataclass(init=False, repr=False, eq=False)
class OtherServerOptions(Settings):
    """Options of SGLang alone, and of TensorRT-LLM alone."""

    disaggregation_transfer_backend: str | None = option(
        None, "How SGLang moves KV entries: nixl or mooncake", default_text="nixl"
    )
    extra_llm_api_options: Mapping[str, Any] | None = option(
        None, "What TensorRT-LLM takes in the file of that option"
    )


@dataclass(init=False, repr=False, eq=False)
class LlamaCppOptions(Settings):
    """Options of llama.cpp alone. The engine checks further ones, by its own names, itself."""

    ENGINE: ClassVar[str] = "llamacpp"

    parallel: int | None = option(
        None,
        "Requests that are computed at once, each in a slot; as `max-num-seqs`",
        minimum=1,
        must_match=("llamacpp",),
    )
    ctx_size: int | None = option(
        None,
        "Context of all slots together, in tokens, 0 for the model's; `max-model-len` is that of one",
        minimum=0,
        names={"llamacpp": ("n-ctx",)},
    )
    threads: int | None = option(None, "Threads that compute", minimum=-1, default_text="half of the cores")
    threads_batch: int | None = option(None, "Threads that compute prompts", minimum=-1)
    threads_http: int | None = option(None, "Most HTTP requests at once", minimum=1)
    batch_size: int | None = option(None, "Most tokens of one step; as `max-num-batched-tokens`", minimum=1)
    ubatch_size: int | None = option(None, "Most tokens that are computed in one piece", minimum=1)
    n_gpu_layers: Any = option(None, "Layers on the GPU: a number, `auto` or -1 for all that fit, or `all`")
    main_gpu: int | None = option(None, "The GPU for what is not split", minimum=0)
    split_mode: str | None = option(None, "How layers are divided between GPUs: none, layer or row")
    flash_attn: Any = option(None, "on, off or auto")
    cache_type_k: str | None = option(
        None, "Type of the keys in the KV cache: f16, q8_0 ...", must_match=("llamacpp",)
    )
    cache_type_v: str | None = option(
        None, "Type of the values in the KV cache: f16, q8_0 ...", must_match=("llamacpp",)
    )
    cache_ram: int | None = option(
        None, "MiB of host memory for the KV entries of earlier prompts; -1 is no limit", minimum=-1
    )
    chat_template: str | None = option(None, "Jinja template of chats, when it is not the model's")
    saved_kv_bytes: int = option(
        2 * 10**9,
        "Memory for the KV entries that models save when they are put away, for their next load; 0 is none",
        name="saved-kv",
        kind=Size,
        default_text="2GB",
        is_flag=False,
    )


VLLM_OTHERS = (
    "additional-config", "code-revision", "collect-detailed-traces", "compilation-config",
    "config-format", "data-parallel-size", "disable-cascade-attn", "disable-custom-all-reduce",
    "disable-hybrid-kv-cache-manager", "disable-log-stats", "disable-sliding-window",
    "distributed-executor-backend", "download-dir", "enable-expert-parallel", "enable-lora",
    "enable-prompt-embeds", "enable-sleep-mode", "fully-sharded-loras", "generation-config",
    "hf-config-path", "hf-overrides", "ignore-patterns", "kv-cache-dtype", "kv-events-config",
    "limit-mm-per-prompt", "load-format", "logprobs-mode", "long-prefill-token-threshold", "lora-dtype",
    "max-cpu-loras", "max-logprobs", "max-lora-rank", "max-loras", "max-parallel-loading-workers",
    "mm-processor-kwargs", "model-impl", "model-loader-extra-config", "override-generation-config",
    "prefix-caching-hash-algo", "pt-load-map-location", "ray-workers-use-nsight", "reasoning-parser",
    "revision", "scheduler-cls", "scheduling-policy", "skip-tokenizer-init", "speculative-config",
    "tokenizer-mode", "tokenizer-revision", "use-tqdm-on-load", "worker-cls", "worker-extension-cls"
)  # fmt: skip
"""vLLM's further options: known by name, checked by vLLM."""

VLLM_REMOVED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "block-manager", "calculate-kv-scales", "disable-async-output-proc",
            "disable-mm-preprocessor-cache", "enable-prompt-adapter", "logits-processor-pattern",
            "long-lora-scaling-factors", "lora-extra-vocab-size", "max-long-partial-prefills",
            "max-num-partial-prefills", "max-prompt-adapter-token", "max-prompt-adapters",
            "multi-step-stream-outputs", "num-lookahead-slots", "num-scheduler-steps",
            "override-neuron-config", "preemption-mode", "priority-queue", "qlora-adapter-name-or-path",
            "scheduler-delay-factor", "tokenizer-pool-extra-config", "tokenizer-pool-size",
            "tokenizer-pool-type", "use-v2-block-manager", "worker-use-ray"
        ),
        _NO_MORE
    ),
    "device": "vLLM finds the device itself",
    "disable-log-requests": "vLLM logs no requests unless enable-log-requests is set",
    "enable-reasoning": "reasoning-parser alone says it",
    "guided-decoding-backend": "use structured-outputs-config",
    "rope-scaling": "use hf-overrides",
    "rope-theta": "use hf-overrides",
    "task": "use runner and convert",
    "override-pooler-config": "use pooler-config",
    "cuda-graph-sizes": "use compilation-config",
    "max-seq-len-to-capture": "use compilation-config",
    "show-hidden-metrics": "use show-hidden-metrics-for-version"
}  # fmt: skip
"""Options of 2025 that today's vLLM refuses with exit code 2, and what replaced each."""


FRONTEND = options_of(ModelSettings, FrontendSettings, DisaggregationSettings, ProcessSettings)
PROCESSOR = options_of(ModelSettings, RoutingSettings, DisaggregationSettings, ProcessorSettings)
ROUTER = options_of(ModelSettings, RoutingSettings, DisaggregationSettings, RouterSettings)
PLANNER = options_of(PlannerSettings)

_OTHERS: Options = {
    **{name: Option("An option of vLLM", name=name) for name in VLLM_OTHERS},
    **{
        name: Option("An option of vLLM of 2025", name=name, removed={"vllm": why})
        for name, why in VLLM_REMOVED.items()
    },
}

WORKER: Options = {
    **options_of(WorkerSettings, EngineOptions, SimulationOptions, VllmOptions, CommandSettings),
    **options_of(OtherServerOptions, LlamaCppOptions, RoutingSettings, DisaggregationSettings),
    **_OTHERS,
}
"""The keys of decode and of prefill workers: the original's services share one parser."""

OWN_OPTIONS = frozenset(
    (
        *options_of(WorkerSettings, CommandSettings, SimulationOptions),
        *options_of(RoutingSettings, DisaggregationSettings, ComponentSettings),
        *(name for name, each in WORKER.items() if not each.is_flag),
        *("common-configs", "ServiceArgs"),
    )
)
"""Keys of a worker's section that no engine gets as a flag."""


def engine_names(engine: str) -> dict[str, tuple[str, ...]]:
    """Map each option that this engine has under other names to those names."""
    return {name: each.names[engine] for name, each in WORKER.items() if engine in each.names}


def removed_from(engine: str) -> dict[str, str]:
    """Options that this engine does not accept, and what replaced each."""
    return {name: each.removed[engine] for name, each in WORKER.items() if engine in each.removed}


def matching_options(engine: str) -> tuple[str, ...]:
    """Options that decode and prefill workers of this engine must have in common."""
    return tuple(
        name
        for name, each in WORKER.items()
        if engine in each.must_match or (each.must_match == REAL_ENGINES and engine != SIMULATED)
    )
