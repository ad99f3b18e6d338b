"""What holds for the launch line of every engine kind; the tables say what each engine calls it.

None of these engines is run here. ``tests/fixtures/engines/{sglang,trtllm}/flags.txt`` are the flags of their
own argument parsers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynaplan.engines import sglang, trtllm, vllm
from dynaplan.engines.llamacpp import launch_line as llamacpp
from dynaplan.engines.port import EngineContext
from dynaplan.engines.requirements import Requirement
from dynaplan.engines.server.engine_options import lora_names
from dynaplan.engines.server.kind import LaunchLine, ServerKind, cached_tokens_of
from dynaplan.engines.server.metrics import EngineMetrics, read_metrics
from dynaplan.util.errors import ConfigError

FIXTURES = Path(__file__).parents[3] / "fixtures" / "engines"
TOKEN = "the-worker-token"
FIRST_PORT = 18000
GPU = "GPU-11111111-2222-3333-4444-555555555555"


@dataclass(frozen=True)
class Case:
    """One kind under test. ``options`` name a program, because none of the engines is installed.

    ``every`` are all options that an adapter has to know, ``tensor`` its flag for the tensor parallel size.
    """

    kind: ServerKind
    options: Mapping[str, Any]
    tensor: str = ""
    every: Mapping[str, Any] = field(default_factory=dict)

    def line(self, options: Mapping[str, Any] | None = None, **surroundings: Any) -> LaunchLine:
        given = {"model": "m", **self.options, **(options or {})}
        context = EngineContext("ns_w", token=TOKEN, scratch_dir="/dev/shm/dynaplan", **surroundings)
        ports = range(FIRST_PORT, FIRST_PORT + self.kind.ports_needed(given, context))
        return self.kind.command(given, context, tuple(ports))

    def words(self, options: Mapping[str, Any] | None = None, **surroundings: Any) -> tuple[str, ...]:
        return self.line(options, **surroundings).argv

    def check(self, options: Mapping[str, Any], gpus: float = 1) -> None:
        self.kind.check({"model": "m", **self.options, **options}, gpus)


OF_DYNAPLAN = {
    "remote-prefill": True,
    "max-prefill-queue-size": 1000,
    "max-local-prefill-length": 0,
    "hang-timeout": 60,
    "ServiceArgs": {"workers": 1, "resources": {"gpu": 2}},
}
OF_VLLM = {
    "block-size": 64,
    "max-model-len": 16384,
    "max-num-batched-tokens": 8192,
    "max-num-seqs": 64,
    "gpu-memory-utilization": 0.8,
    "enable-prefix-caching": False,
    "enforce-eager": True,
    "tokenizer": "org/tokenizer",
    "served-model-name": "public",
    "kv-transfer-config": {"kv_connector": "NixlConnector"},
    "dtype": "bfloat16",
    "trust-remote-code": True,
}
EVERY_OF_SGLANG = {
    **OF_DYNAPLAN,
    **OF_VLLM,
    "engine": "sglang",
    "model": "org/model",
    "seed": 1,
    "kv-cache-dtype": "fp8_e4m3",
    "attention-backend": "fa3",
}
EVERY_OF_TRTLLM = {
    **OF_DYNAPLAN,
    **OF_VLLM,
    "engine": "trtllm",
    "model": "org/model",
    "conditional-disagg": True,
    "enable-chunked-prefill": True,
    "kv-cache-dtype": "fp8",
    "log-level": "warning",
    "extra-llm-api-options": {"cuda_graph_config": {"enable_padding": True}},
}
PYTHON_SGLANG = {"sglang-command": "/opt/sglang/bin/python -m sglang.launch_server"}
CASES = {
    "vllm": Case(vllm.KIND, {"vllm-command": "vllm serve"}, "--tensor-parallel-size"),
    "sglang": Case(sglang.KIND, PYTHON_SGLANG, "--tp-size", EVERY_OF_SGLANG),
    "trtllm": Case(trtllm.KIND, {"trtllm-command": "/opt/trt/trtllm-serve"}, "--tp_size", EVERY_OF_TRTLLM),
    "llamacpp": Case(llamacpp.KIND, {"llama-server": "llama-server"}),
}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPU)
    monkeypatch.setattr(Requirement, "check", lambda *_: None)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def value(argv: Sequence[str], flag: str) -> str:
    """The word after a flag that is there once."""
    assert argv.count(flag) == 1, f"{flag} in {argv}"
    return argv[argv.index(flag) + 1]


def kv_cache(line: LaunchLine) -> Mapping[str, Any]:
    """What TensorRT-LLM's file says of the KV cache."""
    (text,) = line.files.values()
    return yaml.safe_load(text).get("kv_cache_config", {})


# -- flags ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("every", [False, True], ids=["nothing", "everything"])
@pytest.mark.parametrize("name", ["sglang", "trtllm"])
def test_every_flag_is_one_that_the_engine_has_and_there_once(name: str, every: bool, role: str) -> None:
    case = CASES[name]
    argv = case.words(case.every if every else {}, role=role, gpus=2)
    flags = [word for word in argv if word.startswith("--")]
    assert set(flags) <= set((FIXTURES / name / "flags.txt").read_text().split())
    assert sorted(flags) == sorted(set(flags)), "a flag twice"


@pytest.mark.parametrize(
    ("name", "options", "flag", "expected"),
    [
        ("vllm", {"max-num-seqs": 8}, "--max-num-seqs", "8"),
        ("vllm", {"served-model-name": "mine"}, "--served-model-name", "mine"),
        ("vllm", {"brand-new-flag": "x"}, "--brand-new-flag", "x"),
        ("vllm", {"hf-overrides": {"a": 1}}, "--hf-overrides", '{"a":1}'),
        ("sglang", {"max-model-len": 4096}, "--context-length", "4096"),
        ("sglang", {"block-size": 64}, "--page-size", "64"),
        ("sglang", {"gpu-memory-utilization": 0.7}, "--mem-fraction-static", "0.7"),
        ("sglang", {"max-num-seqs": 8}, "--max-running-requests", "8"),
        ("sglang", {"max-num-batched-tokens": 2048}, "--chunked-prefill-size", "2048"),
        ("sglang", {"seed": 7}, "--random-seed", "7"),
        ("sglang", {"context-length": 4096}, "--context-length", "4096"),
        ("sglang", {"brand-new-flag": "x"}, "--brand-new-flag", "x"),
        ("sglang", {"log-level-http": "info"}, "--log-level-http", "info"),
        ("trtllm", {"max-model-len": 4096}, "--max_seq_len", "4096"),
        ("trtllm", {"max-num-seqs": 8}, "--max_batch_size", "8"),
        ("trtllm", {"max-num-batched-tokens": 2048}, "--max_num_tokens", "2048"),
        ("trtllm", {"max-batch-size": 8}, "--max_batch_size", "8"),
        ("trtllm", {"brand-new-flag": "x"}, "--brand_new_flag", "x"),
        ("llamacpp", {"max-num-seqs": 8}, "--parallel", "8"),
        ("llamacpp", {"max-num-batched-tokens": 2048}, "--batch-size", "2048"),
        ("llamacpp", {"brand-new-flag": "x"}, "--brand-new-flag", "x"),
    ],
)
def test_an_option_is_the_flag_that_the_engine_calls_it(
    name: str, options: dict[str, Any], flag: str, expected: str
) -> None:
    assert value(CASES[name].words(options), flag) == expected


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vllm", {"model": ""}, "model is ''"),
        ("vllm", {"port": 8000}, "port cannot be set"),
        ("vllm", {"host": "0.0.0.0"}, "host cannot be set"),
        ("vllm", {"api-key": "mine"}, "api-key cannot be set"),
        ("vllm", {"disable-log-stats": True}, "disable-log-stats cannot be set"),
        ("vllm", {"hang-timeout": -1}, "hang-timeout is -1"),
        ("vllm", {"start-timeout": "soon"}, "start-timeout is 'soon'"),
        ("vllm", {"vllm-command": 5}, "vllm-command is 5"),
        ("vllm", {"vllm-command": 'unclosed "quote'}, "vllm-command"),
        ("vllm", {"kv-transfer-config": 5}, "kv-transfer-config is 5"),
        ("sglang", {"port": 9000}, "port cannot be set with engine sglang"),
        ("sglang", {"config": "mine.yaml"}, "config cannot be set with engine sglang"),
        ("sglang", {"served-model-name": "a:b"}, "served-model-name is 'a:b'"),
        (
            "sglang",
            {"max-model-len": 1, "context-length": 2},
            "max-model-len is 1 and context-length is 2",
        ),
        ("sglang", {"remote-prefill": True, "conditional-disagg": True}, "cannot compute a prompt itself"),
        ("sglang", {"sglang-command": 5}, "sglang-command is 5"),
        ("sglang", {"model": ""}, "model is ''"),
        ("trtllm", {"host": "0.0.0.0"}, "host cannot be set with engine trtllm"),
        ("trtllm", {"extra-llm-api-options": "file.yaml"}, "extra-llm-api-options is 'file.yaml'"),
        ("trtllm", {"max-num-seqs": 1, "max-batch-size": 2}, "max-num-seqs is 1 and max-batch-size is 2"),
        ("trtllm", {"data-parallel-size": 2, "tp-size": 1}, "data-parallel-size"),
        ("trtllm", {"trtllm-command": 5}, "trtllm-command is 5"),
        ("trtllm", {"model": None}, "model is None"),
        ("llamacpp", {"port": 9000}, "port cannot be set with engine llamacpp"),
        ("llamacpp", {"llama-server": 5}, "llama-server is 5"),
    ],
)
def test_what_the_engine_could_not_start_with_is_refused_before(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CASES[name].check(options)


# -- where it listens, and its secrets -----------------------------------------------------------------


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_the_server_listens_on_this_machine_only_on_the_first_leased_port(case: Case, role: str) -> None:
    argv = case.words(role=role)
    assert (value(argv, "--host"), value(argv, "--port")) == ("127.0.0.1", str(FIRST_PORT))


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_the_key_is_on_no_command_line(case: Case, role: str) -> None:
    assert TOKEN not in " ".join(case.words(role=role))


def test_a_token_for_the_hub_is_a_variable_and_no_flag(case: Case) -> None:
    line = case.line({"hf-token": "hf_secret"})
    assert line.environment["HF_TOKEN"] == "hf_secret"
    assert not any("hf_secret" in word or "hf-token" in word or "hf_token" in word for word in line.argv)


# -- GPUs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm"])
def test_one_resource_gives_the_gpus_and_the_flag(name: str) -> None:
    case = CASES[name]
    assert value(case.words(gpus=4), case.tensor) == "4"
    assert value(case.words({"tp-size": 4}, gpus=4), case.tensor) == "4"
    assert value(case.words({"pipeline-parallel-size": 2}, gpus=4), case.tensor) == "2"
    with pytest.raises(ConfigError, match=r"tp-size 2 needs 2 GPUs, but resources\.gpu is 4"):
        case.check({"tp-size": 2}, 4)


FRACTIONS: Mapping[str, tuple[float, str, Callable[[LaunchLine], object]]] = {
    "vllm": (0.45, "gpu-memory-utilization", lambda line: value(line.argv, "--gpu-memory-utilization")),
    "sglang": (0.44, "mem-fraction-static", lambda line: value(line.argv, "--mem-fraction-static")),
    "trtllm": (0.45, "gpu-memory-utilization", lambda line: kv_cache(line)["free_gpu_memory_fraction"]),
}
"""Of half a GPU: the memory fraction, the option that overrides it, and where the engine reads it."""


@pytest.mark.parametrize("name", FRACTIONS)
def test_a_part_of_a_gpu_gets_that_part_of_its_memory_unless_told_otherwise(name: str) -> None:
    case, (half, option, read) = CASES[name], FRACTIONS[name]
    assert str(read(case.line(gpus=0.5))) == str(half)
    assert str(read(case.line({option: 0.3}, gpus=0.5))) == "0.3"
    whole = case.line(gpus=1)
    assert not any("memory" in word or "mem-" in word for word in whole.argv)
    assert not whole.files or "free_gpu_memory_fraction" not in "".join(whole.files.values())


@pytest.mark.parametrize("name", FRACTIONS)
def test_an_engine_takes_the_part_of_the_memory_that_it_was_assigned_unless_told_otherwise(name: str) -> None:
    case, (_, option, read) = CASES[name], FRACTIONS[name]
    assert str(read(case.line(gpus=1, memory_fraction=0.35))) == "0.35"
    assert str(read(case.line({option: 0.3}, gpus=1, memory_fraction=0.35))) == "0.3"


# -- metrics -------------------------------------------------------------------------------------------

RECORDED = {
    "sglang": EngineMetrics(
        running=5,
        waiting=3,
        kv_usage=0.42,
        kv_active=27525,
        kv_total=65536,
        prefix_hit_rate=0.25,
        progress=(2640.0, 40.0),
        generated=40,
        samples={"sglang:time_to_first_token_seconds_sum": 0.1},
    ),
    "trtllm": EngineMetrics(
        running=5,
        waiting=3,
        kv_usage=0.375,
        kv_active=384,
        kv_total=1024,
        prefix_hit_rate=0.25,
        generated=140,
        samples={"trtllm_generation_tokens_total": 140.0},
    ),
}
"""What the metrics tell, with one of their samples; for vLLM and llama.cpp see test_signals."""


@pytest.mark.parametrize("name", RECORDED)
def test_every_signal_is_found_in_the_recorded_metrics(name: str) -> None:
    signals = read_metrics((FIXTURES / name / "metrics.txt").read_text(), CASES[name].kind.metric_names)
    samples = {sample: signals.samples[sample] for sample in RECORDED[name].samples}
    assert samples == pytest.approx(RECORDED[name].samples)
    assert replace(signals, samples=RECORDED[name].samples, counters=None) == RECORDED[name]


@pytest.mark.parametrize(
    ("usage", "cached_tokens"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 96}}, 96),
        ({"prompt_tokens_details": None}, None),
        ({"prompt_tokens_details": {"cached_tokens": "96"}}, None),
        (None, None),
    ],
)
def test_the_cached_part_of_a_prompt_is_read_where_the_engine_says_it(
    usage: object, cached_tokens: int | None
) -> None:
    assert cached_tokens_of({"usage": usage}) == cached_tokens


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (None, []),
        ("sql=/loras/sql", ["sql"]),
        ("sql=/loras/sql chat=/loras/chat", ["sql", "chat"]),
        (["sql=/loras/sql", "chat=/loras/chat"], ["sql", "chat"]),
        ('{"name": "sql", "path": "/loras/sql"}', ["sql"]),
        ([{"name": "sql", "path": "/loras/sql"}, '{"name": "chat"}'], ["sql", "chat"]),
        (["without", "{broken", {"path": "/x"}, 7], []),
    ],
)
def test_adapters_are_found_by_their_names(modules: Any, names: list[str]) -> None:
    assert lora_names(modules) == names
