"""The options of the stock services: plain tables, read when a configuration is checked."""

from __future__ import annotations

from dataclasses import replace

from dynaplan.core.routing.choosing import MODES
from dynaplan.options.tables import Kind, Option, Options


def _text(about: str) -> Option:
    return Option(Kind.TEXT, about)


def _flag(about: str) -> Option:
    return Option(Kind.BOOLEAN, about)


def _whole(about: str, least: float = 0) -> Option:
    return Option(Kind.INTEGER, about, least)


def _number(about: str, least: float = 0) -> Option:
    return Option(Kind.NUMBER, about, least)


MODEL: Options = {
    "model": _text("The model, as the engine knows it"),
    "served-model-name": _text("The name that clients use"),
    "block-size": _whole("Tokens of one KV block", 1),
    "max-model-len": _whole("Context length in tokens", 1),
}

ROUTING: Options = {
    "router": Option(Kind.TEXT, "How a worker is chosen", choices=tuple(MODES)),
    "router-num-threads": _whole("Of the original; has no effect", 1),
    "min-workers": _whole("Of the original; has no effect"),
    "kv-overlap-score-weight": _number("Weight of the cached prefix in the KV router's cost"),
}

DISAGGREGATION: Options = {
    "remote-prefill": _flag("Let prefill workers compute prompts"),
    "conditional-disagg": _flag("Decide per request whether prefill is remote"),
    "max-local-prefill-length": _whole("Tokens up to which a prompt is computed by the decode worker"),
    "max-prefill-queue-size": _whole("Queued prompts from which on the decode worker computes for itself"),
}

PROCESS: Options = {
    "drain-deadline": _number("Seconds for a worker to finish its requests before it is killed"),
}

FRONTEND: Options = {
    **MODEL,
    **ROUTING,
    **DISAGGREGATION,
    **PROCESS,
    "endpoint": _text("Of the original, dynamo.Processor.chat/completions; has no effect"),
    "endpoint-chat": _text("Of the original; has no effect"),
    "endpoint-completions": _text("Of the original; has no effect"),
    "port": _whole("The public port; --port and DYNAMO_PORT come first"),
    "host": _text("The address to listen on; --host and DYNAMO_HOST come first"),
    "api-key": _text("Key that clients must bear; better as DYNAPLAN_API_KEY"),
    "max-waiting-requests": _whole("Requests that may wait before new ones are answered 429", 1),
    "max-body-bytes": _whole("Largest request body", 1),
    "worker-wait": _number("Seconds that a request waits for a worker when there is none"),
    "prefill-wait": _number("Seconds that a request waits for its remote prefill"),
    "record-traffic": _text("File that the lengths and times of every request are appended to"),
    "decode-component": _text("Service whose workers decode"),
    "prefill-component": _text("Service whose workers prefill"),
}

PROCESSOR: Options = {
    **MODEL,
    **ROUTING,
    **DISAGGREGATION,
    "prompt-template": _text("Of the original; has no effect"),
}

ROUTER: Options = {**MODEL, **ROUTING, **DISAGGREGATION, "indexer": _text("Of the original; has no effect")}

ENGINES: Options = {
    "engine": _text("What computes: sim (simulated), llamacpp, vllm, sglang or trtllm"),
    "start-timeout": _number("Seconds that the engine may take to load the model; default 1800"),
    "hang-timeout": _number("Seconds without progress after which a busy engine is replaced; 0 is never"),
    "max-concurrent-prefills": _whole("Prompts that a prefill worker takes at once", 1),
}
"""What every engine has."""

SERVERS: Options = {
    "vllm-command": Option(Kind.LIST, "The program that starts vLLM's server, with its first arguments"),
    "sglang-command": Option(Kind.LIST, "The program that starts SGLang's server, with its first arguments"),
    "trtllm-command": Option(Kind.LIST, "The program that starts trtllm-serve, with its first arguments"),
    "extra-llm-api-options": Option(Kind.MAPPING, "What TensorRT-LLM takes in the file of that option"),
    "disaggregation-transfer-backend": _text("How SGLang moves KV entries: nixl or mooncake"),
}
"""How the servers of vllm, sglang and trtllm are started."""

LLAMACPP: Options = {
    name: replace(option, engine="llamacpp")
    for name, option in {
        "parallel": _whole("Requests that are computed at once, each in a slot; as max-num-seqs", 1),
        "ctx-size": _whole("Context of all slots together, in tokens; max-model-len is that of one", 1),
        "threads": _whole("Threads that compute; half of the cores when not set", 1),
        "threads-batch": _whole("Threads that compute prompts", 1),
        "threads-http": _whole("Most HTTP requests at once", 1),
        "batch-size": _whole("Most tokens of one step; as max-num-batched-tokens", 1),
        "ubatch-size": _whole("Most tokens that are computed in one piece", 1),
        "n-gpu-layers": _whole("Layers on the GPU; -1 is all that fit", -1),
        "main-gpu": _whole("The GPU for what is not split"),
        "split-mode": _text("How layers are divided between GPUs: none, layer or row"),
        "flash-attn": Option(Kind.ANY, "on, off or auto"),
        "cache-type-k": _text("Type of the keys in the KV cache: f16, q8_0 ..."),
        "cache-type-v": _text("Type of the values in the KV cache: f16, q8_0 ..."),
        "cache-ram": _whole("MiB of host memory for the KV entries of earlier prompts; -1 is no limit", -1),
        "chat-template": _text("Jinja template of chats, when it is not the model's"),
        "llama-server": Option(Kind.ANY, "The llama-server to run in place of xllamacpp: its path, or true"),
    }.items()
}
"""What llama.cpp alone has; more of it, by its own names, is checked by the engine."""

SIMULATION: Options = {
    "speedup-ratio": _number("Divides every simulated duration; 0 means no delay at all"),
    "startup-time": _number("Simulated seconds from start to ready"),
    "profile": _text("Measured profile to take times from: a name or a path"),
    "kv-total-tokens": _whole("KV cache size in tokens", 1),
    "jitter": _number("Largest random change of a step's duration, as a part of it"),
}

VLLM: Options = {
    "dtype": _text("Type of weights and activations"),
    "quantization": _text("Method of quantization"),
    "tokenizer": _text("Tokenizer, when it is not the model's"),
    "trust-remote-code": _flag("Run code that comes with the model"),
    "max-num-batched-tokens": _whole("Most tokens of one step", 1),
    "max-num-seqs": _whole("Most requests of one step", 1),
    "tensor-parallel-size": _whole("GPUs that each layer is split over", 1),
    "pipeline-parallel-size": _whole("GPUs that the layers are divided between", 1),
    "gpu-memory-utilization": _number("Part of the GPU's memory to use"),
    "num-gpu-blocks-override": _whole("KV blocks, instead of what fits", 1),
    "swap-space": _number("GiB of host memory per GPU for swapped KV blocks"),
    "cpu-offload-gb": _number("GiB of weights per GPU kept in host memory"),
    "enforce-eager": _flag("No CUDA graphs"),
    "enable-prefix-caching": _flag("Keep the KV blocks of prefixes for later requests"),
    "enable-chunked-prefill": _flag("Divide prompts over several steps"),
    "kv-transfer-config": Option(Kind.MAPPING, "How KV blocks move between workers"),
    "seed": _whole("Of every random choice"),
}

VLLM_OTHERS = (
    "additional-config", "block-manager", "calculate-kv-scales", "code-revision",
    "collect-detailed-traces", "compilation-config", "config-format", "cuda-graph-sizes",
    "data-parallel-size", "device", "disable-async-output-proc", "disable-cascade-attn",
    "disable-custom-all-reduce", "disable-hybrid-kv-cache-manager", "disable-log-requests",
    "disable-log-stats", "disable-mm-preprocessor-cache", "disable-sliding-window",
    "distributed-executor-backend", "download-dir", "enable-expert-parallel", "enable-lora",
    "enable-prompt-adapter", "enable-prompt-embeds", "enable-reasoning", "enable-sleep-mode",
    "fully-sharded-loras", "generation-config", "guided-decoding-backend", "hf-config-path",
    "hf-overrides", "hf-token", "ignore-patterns", "kv-cache-dtype", "kv-events-config",
    "limit-mm-per-prompt", "load-format", "logits-processor-pattern", "logprobs-mode",
    "long-lora-scaling-factors", "long-prefill-token-threshold", "lora-dtype", "lora-extra-vocab-size",
    "max-cpu-loras", "max-logprobs", "max-long-partial-prefills", "max-lora-rank", "max-loras",
    "max-num-partial-prefills", "max-parallel-loading-workers", "max-prompt-adapter-token",
    "max-prompt-adapters", "max-seq-len-to-capture", "mm-processor-kwargs", "model-impl",
    "model-loader-extra-config", "multi-step-stream-outputs", "num-lookahead-slots",
    "num-scheduler-steps", "override-generation-config", "override-neuron-config",
    "override-pooler-config", "preemption-mode", "prefix-caching-hash-algo", "priority-queue",
    "pt-load-map-location", "qlora-adapter-name-or-path", "ray-workers-use-nsight", "reasoning-parser",
    "revision", "rope-scaling", "rope-theta", "scheduler-cls", "scheduler-delay-factor",
    "scheduling-policy", "show-hidden-metrics", "skip-tokenizer-init", "speculative-config", "task",
    "tokenizer-mode", "tokenizer-pool-extra-config", "tokenizer-pool-size", "tokenizer-pool-type",
    "tokenizer-revision", "use-tqdm-on-load", "use-v2-block-manager", "worker-cls",
    "worker-extension-cls", "worker-use-ray",
)  # fmt: skip
"""vLLM's further engine options: known by name, checked by vLLM."""

ENGINE: Options = {
    **{name: Option(Kind.ANY, "An option of vLLM") for name in VLLM_OTHERS},
    **MODEL,
    **ENGINES,
    **SERVERS,
    **VLLM,
    **LLAMACPP,
    **SIMULATION,
    **PROCESS,
}

VLLM_WORKER: Options = {**ENGINE, **ROUTING, **DISAGGREGATION}

PREFILL_WORKER: Options = {**ENGINE, **ROUTING, **DISAGGREGATION}
"""A prefill worker takes the decode worker's options as well: the original's services share one parser."""
