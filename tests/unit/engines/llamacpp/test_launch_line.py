"""The launch of a llama.cpp server: its options and its command lines."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from dynaplan.engines.llamacpp import engine as llamacpp
from dynaplan.engines.llamacpp import launch_line
from dynaplan.engines.llamacpp import launch_line as llamacpp_options
from dynaplan.engines.llamacpp.launch_line import LlamaOptions, read_options
from dynaplan.engines.llamacpp.server_main import main
from dynaplan.engines.llamacpp.xllamacpp_fields import check_fields
from dynaplan.engines.port import EngineContext
from dynaplan.engines.server.child import EngineChild
from dynaplan.engines.server.kind import LaunchLine
from dynaplan.util.errors import ConfigError, WorkerStartFailed

MODEL = "/models/SmolLM2.gguf"


def read(**options: Any) -> LlamaOptions:
    return read_options({"model": MODEL, **{key.replace("_", "-"): options[key] for key in options}}, 1)


def test_a_request_may_be_as_long_as_max_model_len_whatever_the_number_of_slots() -> None:
    assert read(max_model_len=1000, max_num_seqs=8).context_tokens == 8000
    assert read(max_model_len=1000, parallel=2).slots == 2
    assert read(ctx_size=9000, parallel=3).context_tokens == 9000
    assert read(ctx_size=9000, max_model_len=3000, parallel=3).context_tokens == 9000
    assert read().context_tokens == 4 * 4096


def test_the_path_is_not_the_model_s_name() -> None:
    assert read().name == "SmolLM2"
    assert read(served_model_name="mine").name == "mine"


def test_options_of_dynaplan_are_not_llamacpp_s() -> None:
    ours = {"engine": "llamacpp", "router": "kv", "ServiceArgs": {}, "speedup-ratio": 1, "hang-timeout": 5}
    assert read(**ours).flags == read().flags
    assert read(rope_freq_base=5.0, nothing=None).flags == {**read().flags, "rope-freq-base": 5.0}


def test_only_a_model_that_uses_prefixes_again_saves_its_slots() -> None:
    assert read().saved_kv_bytes == 2 * 10**9
    assert read(**{"saved-kv": "500MB"}).saved_kv_bytes == 500 * 10**6
    for unused in ({"saved-kv": 0}, {"cache-prompt": False}, {"pooling": "mean"}, {"embedding": True}):
        assert read(**unused).saved_kv_bytes == 0


def test_a_value_is_set_once_under_either_name() -> None:
    assert read(max_num_batched_tokens=64).flags["batch-size"] == 64
    both = read(max_num_batched_tokens=64, batch_size=64)
    assert both.flags == read(b=64).flags == read(max_num_batched_tokens=64).flags
    assert read().flags["batch-size"] == 512
    assert read(c=4096, np=2, embedding=True).slots == read(ctx_size=4096, parallel=2).slots == 2


def test_a_context_without_a_number_of_slots_is_for_each_request() -> None:
    """As llama-server has it: four slots, that share their context."""
    shared = read(ctx_size=2048)
    assert (shared.slots, shared.context_tokens, shared.is_unified) == (4, 2048, True)
    assert "--kv-unified" in launch_line.server_flags(shared)
    assert launch_line.params_fields(shared)["kv_unified"] is True
    assert read(ctx_size=0).context_tokens == 0
    for divided in (read(), read(ctx_size=2048, parallel=2), read(max_model_len=512)):
        assert not divided.is_unified
    assert read(ctx_size=2048, parallel=2, kv_unified=True).is_unified


def test_a_model_that_embeds_takes_a_text_as_long_as_its_context_in_one_step() -> None:
    for options, tokens in (
        ({"ctx_size": 2048}, 2048),
        ({"max_model_len": 512}, 512),
        ({"ctx_size": 2048, "parallel": 2}, 1024),
        ({"batch_size": 256}, 256),
        ({"ctx_size": 0}, 2048),
    ):
        flags = read(embedding=True, **options).flags
        assert (flags["batch-size"], flags["ubatch-size"]) == (tokens, tokens), options


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"jinja": True, "temp": 0.6, "top-p": 0.95}, {"use_jinja": True, "sampling.temp": 0.6}),
        ({"ngl": "all"}, {"n_gpu_layers": -2}),
        ({"gpu-layers": "auto", "t": -1}, {"n_gpu_layers": -1, "cpuparams.n_threads": -1}),
        ({"mlock": True}, {"load_mode": "LLAMA_LOAD_MODE_MLOCK"}),
        ({"no-mmap": True}, {"load_mode": "LLAMA_LOAD_MODE_NONE"}),
        ({"nkvo": True}, {"no_kv_offload": True}),
        ({"reranking": True}, {"embedding": True, "pooling_type": "LLAMA_POOLING_TYPE_RANK"}),
        ({"md": "d.gguf", "draft-max": 8}, {"speculative.draft.mparams.path": "d.gguf"}),
        ({"tensor-split": "3,1"}, {"tensor_split": [3.0, 1.0, *[0.0] * 126]}),
        ({"rope-scaling": "yarn"}, {"rope_scaling_type": "LLAMA_ROPE_SCALING_TYPE_YARN"}),
        ({"fa": "on", "fit": "off"}, {"flash_attn_type": "LLAMA_FLASH_ATTN_TYPE_ENABLED"}),
    ],
)
def test_llama_servers_flags_are_fields_of_the_package(
    options: dict[str, Any], fields: dict[str, Any]
) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    read_of = read_options({"model": MODEL, **options}, 1)
    assert fields.items() <= launch_line.params_fields(read_of).items()
    check_fields(read_of.flags, xllamacpp.CommonParams())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"json-schema": "{}"}, r"json-schema is no setting of xllamacpp(?s:.*)install that program"),
        ({"tempp": 1}, r"tempp is no setting of xllamacpp\s+Did you mean 'temp'"),
        ({"tensor-split": "a,b"}, r"tensor-split is 'a,b'"),
        ({"chat-template-file": "/none"}, r"chat-template-file is '/none'"),
        ({"pooling": "most"}, r"pooling is 'most'\s+Expected one of: unspecified, none, mean"),
        ({"top-k": "few"}, r"top-k is 'few'(?s:.*)Expected int"),
    ],
)
def test_what_the_package_cannot_be_told_is_refused(options: dict[str, Any], problem: str) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    with pytest.raises(ConfigError, match=problem):
        check_fields(read_options({"model": MODEL, **options}, 1).flags, xllamacpp.CommonParams())


def test_threads_are_half_of_the_cores_and_never_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 1), (2, 1), (16, 8)):
        monkeypatch.setattr(llamacpp_options.os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert read().flags["threads"] == threads
    assert read(threads=3).flags["threads"] == 3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": None}, "model"),
        ({"port": 8080}, "port"),
        ({"api_key": "x"}, "api-key"),
        ({"parallel": 0}, "parallel"),
        ({"parallel": 2, "max_num_seqs": 3}, "max-num-seqs"),
        ({"batch_size": 2, "max_num_batched_tokens": 3}, "max-num-batched-tokens"),
        ({"ctx_size": 100, "max_model_len": 100}, "ctx-size"),
        ({"threads": "many"}, "threads"),
        ({"flash_attn": "perhaps"}, "flash-attn"),
        ({"enable_prefix_caching": 1}, "enable-prefix-caching"),
        ({"chat_template": 5}, "chat-template"),
        ({"block_size": 0}, "block-size"),
        ({"hang_timeout": -1}, "hang-timeout"),
        ({"llama_server": 5}, "llama-server"),
        ({"tensor_parallel_size": 2}, "tensor-parallel-size"),
        ({"data_parallel_size": 2}, "data-parallel-size"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(**options)
    section = {key.replace("_", "-"): value for key, value in {"model": MODEL, **options}.items()}
    for check in (launch_line.KIND.check_ahead, launch_line.KIND.check):
        with pytest.raises(ConfigError, match=named):
            check(section, 1)


CONTEXT = EngineContext("w", token="secret", scratch_dir="/dev/shm/d")
SECTION = {
    "max-model-len": 2048,
    "served-model-name": "mine",
    "threads": 2,
    "n-gpu-layers": 20,
    "flash-attn": True,
    "cache-type-k": "q8_0",
    "max-num-batched-tokens": 1024,
    "enable-prefix-caching": False,
    "hf-token": "hf_secret",
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("GGML_NO_BACKTRACE", raising=False)


@pytest.fixture
def without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_line.importlib.util, "find_spec", lambda _: None)


@pytest.fixture
def with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_line.importlib.util, "find_spec", lambda _: "xllamacpp")


def line(**options: Any) -> LaunchLine:
    section = {key.replace("_", "-"): value for key, value in options.items()}
    return launch_line.KIND.command({"model": MODEL, **SECTION, **section}, CONTEXT, [7001])


def test_the_program_gets_the_options_as_flags_and_its_key_is_none_of_them() -> None:
    made = line(llama_server="/opt/llama-server", mlock=True, tensor_split=[3, 1], jinja=False)
    assert made.argv == (
        *("/opt/llama-server", "--host", "127.0.0.1", "--port", "7001", "--metrics", "--slots"),
        *("--slot-save-path", "/dev/shm/d/", "--model", MODEL, "--alias", "mine"),
        *("--ctx-size", "8192", "--parallel", "4", "--threads", "2", "--threads-http", "1024"),
        *("--batch-size", "1024", "--n-gpu-layers", "20", "--flash-attn", "on", "--cache-type-k", "q8_0"),
        *("--no-cache-prompt", "--mlock", "--tensor-split", "3,1", "--no-jinja"),
    )
    assert made.environment == {
        "LLAMA_API_KEY": "secret",
        "HF_TOKEN": "hf_secret",
        "GGML_NO_BACKTRACE": "1",
    }


def test_our_own_program_gets_the_same_as_json_and_its_key_is_not_among_it(with_the_package: None) -> None:
    made = line(n_keep=64)
    assert made.argv == (
        *(sys.executable, "-m", "dynaplan.engines.llamacpp.server_main", "2"),
        *('--hostnames=["127.0.0.1"]', "--port=7001", "--endpoint_metrics=true", "--endpoint_slots=true"),
        *("--ui=false", "--verbosity=1", '--slot_save_path="/dev/shm/d/"', f'--model.path="{MODEL}"'),
        *(
            '--model_alias=["mine"]',
            "--n_ctx=8192",
            "--n_parallel=4",
            "--cpuparams.n_threads=2",
            "--n_threads_http=1024",
        ),
        *("--n_batch=1024", "--n_gpu_layers=20", '--flash_attn_type="LLAMA_FLASH_ATTN_TYPE_ENABLED"'),
        *('--cache_type_k="GGML_TYPE_Q8_0"', "--cache_prompt=false", "--n_keep=64"),
    )
    assert made.environment["LLAMA_API_KEY"] == "secret"
    assert made.environment["HF_TOKEN"] == "hf_secret"


def test_our_own_program_serves_on_the_loopback_with_what_its_command_line_says(
    with_the_package: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    given: list[Any] = []

    def server(params: Any) -> None:
        given.append(params)

    monkeypatch.setattr(xllamacpp, "Server", server)
    monkeypatch.setenv("LLAMA_API_KEY", "secret")
    assert main(line(n_keep=64).argv[3:]) == 0
    (params,) = given
    assert (params.hostnames, params.port, params.api_keys) == (["127.0.0.1"], 7001, ["secret"])
    assert (params.model.path, params.model_alias) == (MODEL, {"mine"})
    assert (params.n_ctx, params.n_parallel, params.n_batch, params.n_keep) == (8192, 4, 1024, 64)
    assert params.slot_save_path == "/dev/shm/d/"
    assert params.endpoint_metrics and params.endpoint_slots


@pytest.mark.parametrize(("gpus", "code"), [("", 2), ("GPU-SIM-1", 2), ("GPU-1234", 1)])
def test_a_model_that_does_not_load_may_do_so_later_only_where_a_gpu_may_lack_memory(
    with_the_package: None,
    monkeypatch: pytest.MonkeyPatch,
    gpus: str,
    code: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")

    def refuse(_: Any) -> None:
        raise RuntimeError("no such file")

    monkeypatch.setattr(xllamacpp, "Server", refuse)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert main(line().argv[3:]) == code
    assert f"does not load {MODEL}: no such file" in capfd.readouterr().err


def test_an_option_that_llamacpp_lacks_is_named_and_not_tried_again(
    with_the_package: None, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xllamacpp")
    assert main(line(n_predct=3).argv[3:]) == 2
    said = capfd.readouterr().err
    assert "does not take --n_predct=3" in said


def test_without_the_package_the_program_on_path_serves(
    without_the_package: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_line.shutil, "which", lambda name: f"/bin/{name}")
    launch_line.KIND.check({"model": MODEL}, 0)
    assert line().argv[0] == "/bin/llama-server"


def test_without_either_the_error_says_what_to_install(
    without_the_package: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_line.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError) as raised:
        llamacpp.LlamaCppEngine({"model": MODEL}, EngineContext("w"))
    assert "pip install 'xllamacpp" in raised.value.hint
    with pytest.raises(ConfigError, match="llama-server"):
        llamacpp.LlamaCppEngine({"model": MODEL, "llama-server": True}, EngineContext("w"))


@pytest.mark.parametrize("program", ["llama-server", ""])
async def test_no_secret_is_on_the_command_line_or_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, program: str
) -> None:
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path / "node"))
    monkeypatch.setattr(launch_line.Requirement, "check", lambda *_: None)
    monkeypatch.setattr(launch_line.importlib.util, "find_spec", lambda _: "xllamacpp")
    caplog.set_level(logging.INFO)
    spawned: list[Any] = []

    def spawn(*arguments: Any) -> None:
        spawned.extend(arguments)
        raise WorkerStartFailed("seen enough")

    monkeypatch.setattr(EngineChild, "spawn", spawn)
    options = {"model": MODEL, "llama-server": program, "hf-token": "hf_secret", "ssl-key": "flag-secret"}
    engine = llamacpp.LlamaCppEngine(options, EngineContext("w", token="secret"))
    with pytest.raises(WorkerStartFailed):
        await engine.start()
    await engine.stop()
    argv, environment, _, hidden = spawned
    assert not any("hf_secret" in word or "hf-token" in word or word == "secret" for word in argv)
    assert (environment["LLAMA_API_KEY"], environment["HF_TOKEN"]) == ("secret", "hf_secret")
    assert hidden == "secret", "it is masked in what the program prints"
    assert "starting llamacpp" in caplog.text and "flag-secret" not in caplog.text
