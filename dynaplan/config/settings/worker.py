"""Options of a worker: of its process, of every engine, of the simulated engine, and ``ServiceArgs``.

``names`` are an engine's own for an option, so that one configuration fits them all; ``removed`` is what
became of one that an engine does not take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynaplan.config.settings.fields import NO_EFFECT, READ, REAL_ENGINES, Settings, option
from dynaplan.config.settings.servers import MessagingSettings
from dynaplan.util.errors import ConfigError


@dataclass(frozen=True)
class ProcessSettings(MessagingSettings):
    """Options of a service's processes: their deadlines, in seconds, and their patience with servers."""

    drain_deadline_s: float = option(
        600.0, "Seconds for a worker to finish its requests when it leaves; then it is killed", minimum=0
    )
    health_timeout_s: float = option(
        30.0,
        "Seconds that the `/health` of a worker without registration may say nothing before its process is "
        "killed; 0 is never",
        minimum=0,
    )


@dataclass(frozen=True)
class WorkerSettings(ProcessSettings):
    """Options of a worker that dynaplan itself reads, whatever the engine.

    ``max_concurrent_prefills``: prefill is bound by computation, so batching short prompts is all there is to
    gain: four keep the engine from idling between two. A prompt that a worker has taken cannot move to one
    that is added later.
    """

    engine: str = option(
        "sim",
        "What computes: sim (simulated), llamacpp, vllm, sglang, trtllm, or command",
        must_match=REAL_ENGINES,
    )
    start_timeout_s: float = option(
        1800.0, "Seconds that the engine's server may take to load the model", minimum=0
    )
    hang_timeout_s: float = option(
        120.0,
        "Seconds without progress after which an engine that has requests is replaced; 0 is never",
        minimum=0,
    )
    kv_network: bool = option(
        False,
        "Let KV entries move between hosts, by NIXL: its sockets listen on `--advertise-host`, without a key",
        engine="vllm",
    )
    max_concurrent_prefills: int = option(
        4, "Prompts that a prefill worker takes from the queue at once", minimum=1
    )


@dataclass(init=False, repr=False, eq=False)
class CommandSettings(Settings):
    """The programs that real engines are started with."""

    vllm_command: list[str] | None = option(
        None, "The program that starts vLLM's server, with its first arguments: a text, or a list of words"
    )
    sglang_command: list[str] | None = option(None, "The same for SGLang's server")
    trtllm_command: list[str] | None = option(None, "The same for `trtllm-serve`")
    command: list[str] | None = option(
        None,
        "A program that speaks OpenAI's API, run as it is written, with `${PORT}` in the place of its port: "
        "a text, or a list. In one that starts llama.cpp, vLLM or SGLang the engine is recognised",
    )
    check_path: str = option(
        "/health", "The path of a command that answers 200 when it takes requests", name="check"
    )
    stop_command: list[str] | None = option(
        None,
        "What is run to end it in the place of SIGTERM, with `${PID}` and `${PORT}`; killed if that does not",
    )
    llama_server: Any = option(
        None,
        "The `llama-server` to run in place of the `xllamacpp` package: its path, or true",
        engine="llamacpp",
    )


@dataclass(frozen=True, init=False, repr=False, eq=False)
class ModelSettings(Settings):
    """The model, and how much of it a request may use. The defaults are the simulated engine's.

    ``context_tokens`` 0 is what fits: see ``engines/timing_model/engine_model.py``.
    """

    model: str = option(
        "nvidia/Llama-3.1-8B-Instruct-FP8",
        "The model, as the engine knows it; real engines need it",
        must_match=REAL_ENGINES,
    )
    served_model_name: str | None = option(
        None,
        "The name that clients use",
        default_text="the last part of the model's path",
        must_match=REAL_ENGINES,
    )
    block_tokens: int = option(
        16,
        "Tokens of one KV block",
        name="block-size",
        minimum=1,
        names={"sglang": ("page-size",)},
        engine_defaults={"llamacpp": 64},
    )
    context_tokens: int = option(
        0,
        "Context length in tokens",
        name="max-model-len",
        minimum=1,
        default_text="16384, or what the KV cache holds",
        names={"sglang": ("context-length",), "trtllm": ("max-seq-len",)},
    )


STEP_OPTION, SLOT_OPTION = "max-num-batched-tokens", "max-num-seqs"
"""The tokens and the requests of an engine's step."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class EngineOptions(ModelSettings):
    """Options of every engine, by vLLM's names. The defaults are the simulated engine's."""

    batched_tokens: int = option(
        8192,
        "Most tokens of one step",
        name=STEP_OPTION,
        minimum=1,
        names={
            "sglang": ("chunked-prefill-size",),
            "trtllm": ("max-num-tokens",),
            "llamacpp": ("batch-size",),
        },
        engine_defaults={"llamacpp": 512},
    )
    request_slots: int = option(
        256,
        "Most requests of one step",
        name=SLOT_OPTION,
        minimum=1,
        names={
            "sglang": ("max-running-requests",),
            "trtllm": ("max-batch-size",),
            "llamacpp": ("parallel", "n-parallel"),
        },
        engine_defaults={"llamacpp": 4},
        must_match=("llamacpp",),
    )
    is_prefix_caching: bool = option(
        True,
        "Keep the KV blocks of prefixes for later requests",
        name="enable-prefix-caching",
        names={"llamacpp": ("cache-prompt",)},
    )
    tensor_parallel_size: int = option(
        1, "GPUs that each layer is split over", minimum=1, default_text="the worker's GPUs"
    )
    total_blocks: int = option(
        0,
        "KV blocks, instead of what fits",
        name="num-gpu-blocks-override",
        minimum=1,
        default_text="what fits",
        removed={
            "sglang": "it is vLLM's; SGLang's is max-total-tokens",
            "trtllm": "it is vLLM's; set max_tokens of kv_cache_config instead",
        },
    )
    seed: int = option(
        0,
        "Of every random choice",
        minimum=0,
        names={"sglang": ("random-seed",)},
        removed={"trtllm": "trtllm-serve has none"},
    )


DEFAULT_PROFILE = "h200_sxm-Llama-3.1-8B-Instruct-FP8"
DEFAULT_70B_PROFILE = "h100_sxm-Llama-3.3-70B-Instruct-FP8"


@dataclass(frozen=True, init=False, repr=False, eq=False)
class SimulationOptions(Settings):
    """Options of the simulated engine alone."""

    profile: str = option(
        "",
        "Measured profile to take times from, by name or path, or a polynomial: `mocker`, `h100-bf16`, "
        "`a100-bf16`, `h200-bf16`, `h200-fp8-fit`",
        default_text=f"by the model: `{DEFAULT_PROFILE}`, for a 70B `{DEFAULT_70B_PROFILE}`",
        path=READ,
    )
    speedup_ratio: float = option(
        1.0, "Divides every simulated duration; 0 means no delay at all", minimum=0, maximum=1e9
    )
    startup_time_s: float = option(
        0.0, "Seconds until the worker is ready, as a real engine loads its model", minimum=0, maximum=86_400
    )
    can_sleep: bool = option(
        False,
        "Let its models on request sleep before they are unloaded, as vLLM's do",
        name="enable-sleep-mode",
    )
    jitter: float = option(
        0.0, "Largest random change of a step's duration, as a part of it", minimum=0, maximum=0.5
    )
    total_kv_tokens: int = option(
        0,
        "KV cache size in tokens",
        name="kv-total-tokens",
        minimum=1,
        default_text="the profile's",
        names={"sim": ("kv-total-tokens",), "sglang": ("max-total-tokens",)},
    )


@dataclass(frozen=True)
class SimOptions(EngineOptions, SimulationOptions):
    """The simulated engine's options, checked. 0 blocks, KV tokens or context tokens: the profile's.

    ``speedup_ratio`` divides every simulated time; 0 means no delays at all. ``profile`` is empty
    (chosen by model), a name, or a path.
    """

    @property
    def profile_name(self) -> str:
        """The profile that the options name; by default that of the 8B model, or of the 70B for such."""
        return self.profile or (DEFAULT_70B_PROFILE if "70b" in self.model.lower() else DEFAULT_PROFILE)

    def check(self, given: frozenset[str] = frozenset()) -> None:
        """Raise ConfigError for a step that has no room for one token of each request."""
        if self.batched_tokens < self.request_slots:
            raise ConfigError(
                f"max-num-batched-tokens is {self.batched_tokens}, max-num-seqs {self.request_slots}",
                hint="Expected the first to be no less than the second, for one token of each per step.",
            )


def engine_of(options: Mapping[str, Any]) -> str:
    """The engine that a worker's options choose, keys in kebab-case; without one the simulated engine."""
    return str(options.get("engine") or WorkerSettings.engine)


SIMULATED = WorkerSettings.engine
"""The engine of a worker that does not say one; its every option is known."""


@dataclass(init=False, repr=False, eq=False)
class Resources(Settings):
    """The mapping ``resources``: the share of the machine that one worker gets."""

    gpu: float = option(
        0.0,
        "GPUs of one worker; a part of 1 shares a GPU, and the engine gets that part of its memory",
        minimum=0,
        default_text="1 for the workers of engines, more where their parallel sizes need them",
    )
    cpu: Any = option(None, NO_EFFECT)
    memory: Any = option(None, NO_EFFECT)


@dataclass(init=False, repr=False, eq=False)
class ServiceArgs(Settings):
    """The section ``ServiceArgs`` of a service."""

    workers: int = option(
        1, "Worker processes at the start; of the Frontend also `auto`, one for every two GPUs", minimum=1
    )
    resources: Mapping[str, Any] | None = option(None, "What one worker gets: gpu, cpu, memory")
    envs: Mapping[str, str] | None = option(None, "Environment variables of the workers")
    dynamo: Mapping[str, Any] | None = option(None, f"{NO_EFFECT}: use `--namespace`")
