"""The options of llama.cpp: what they mean, what is refused, and llama-server's command line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from dynaplan.adapters.engines.common.child import EngineChild
from dynaplan.adapters.engines.llamacpp import engine as llamacpp
from dynaplan.adapters.engines.llamacpp import options as llamacpp_options
from dynaplan.adapters.engines.llamacpp import server as llamacpp_server
from dynaplan.adapters.engines.llamacpp.options import LlamaOptions, read_options
from dynaplan.adapters.engines.llamacpp.server import command
from dynaplan.domain.engine import EngineContext
from dynaplan.domain.errors import ConfigError, WorkerStartFailed

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
    assert read(**ours).others == {}
    assert read(rope_freq_base=5.0, nothing=None).others == {"rope-freq-base": 5.0}


def test_a_value_is_set_once_under_either_name() -> None:
    assert read(max_num_batched_tokens=64).knobs["max-num-batched-tokens"] == 64
    assert "batch-size" not in read(max_num_batched_tokens=64).knobs
    both = read(max_num_batched_tokens=64, batch_size=64)
    assert both.knobs["batch-size"] == 64
    assert read().knobs["batch-size"] == 512


def test_threads_are_half_of_the_cores_and_never_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 1), (2, 1), (16, 8)):
        monkeypatch.setattr(llamacpp_options.os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert read().knobs["threads"] == threads
    assert read(threads=3).knobs["threads"] == 3


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
    with pytest.raises(ConfigError, match=named):
        llamacpp.check(section, 1)


def test_the_program_gets_the_same_as_flags_and_its_key_is_none_of_them() -> None:
    options = read(
        llama_server="/opt/llama-server",
        max_model_len=2048,
        served_model_name="mine",
        threads=2,
        n_gpu_layers=20,
        flash_attn=True,
        cache_type_k="q8_0",
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        mlock=True,
        tensor_split=[3, 1],
        jinja=False,
        hf_token="hf_secret",
    )
    assert options.environment == {"HF_TOKEN": "hf_secret"}
    context = EngineContext("w", token="secret", scratch_dir="/dev/shm/d")
    words = command(options, context, 7001)
    assert words == (
        *("/opt/llama-server", "--host", "127.0.0.1", "--port", "7001", "--metrics", "--slots", "--no-webui"),
        *("--slot-save-path", "/dev/shm/d/", "--model", MODEL, "--alias", "mine"),
        *("--ctx-size", "8192", "--parallel", "4", "--threads", "2", "--batch-size", "1024"),
        *("--n-gpu-layers", "20", "--flash-attn", "on", "--cache-type-k", "q8_0", "--no-cache-prompt"),
        *("--threads-http", "1024", "--mlock", "--tensor-split", "3,1", "--no-jinja"),
    )


def test_without_the_package_the_program_on_path_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(llamacpp.shutil, "which", lambda name: f"/bin/{name}")
    engine = llamacpp.LlamaCppEngine({"model": MODEL}, EngineContext("w"))
    assert engine._options.server == "/bin/llama-server"


def test_without_either_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(llamacpp.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError) as raised:
        llamacpp.LlamaCppEngine({"model": MODEL}, EngineContext("w"))
    assert "pip install 'xllamacpp" in raised.value.hint
    with pytest.raises(ConfigError, match="llama-server"):
        llamacpp.LlamaCppEngine({"model": MODEL, "llama-server": True}, EngineContext("w"))


async def test_no_secret_of_the_program_is_on_its_command_line_or_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path))
    caplog.set_level(logging.INFO)
    spawned: list[Any] = []

    def spawn(*arguments: Any) -> None:
        spawned.extend(arguments)
        raise WorkerStartFailed("seen enough")

    monkeypatch.setattr(EngineChild, "spawn", spawn)
    options = read(llama_server="/opt/llama-server", hf_token="hf_secret", ssl_key="flag-secret")
    host = llamacpp_server.make_host(options, EngineContext("w", token="secret"), None)
    with pytest.raises(WorkerStartFailed):
        await host.start()
    await host.stop(is_idle=True)
    argv, environment, _, hidden = spawned
    assert not any("hf_secret" in word or "hf-token" in word for word in argv)
    assert environment == {"LLAMA_API_KEY": "secret", "HF_TOKEN": "hf_secret"}
    assert hidden == "secret", "it is masked in what the program prints"
    assert "starting llama-server" in caplog.text and "flag-secret" not in caplog.text


@pytest.mark.parametrize("timeout_s", [None, 5.0])
async def test_a_start_timeout_that_cannot_hold_is_said_to_have_no_effect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, timeout_s: float | None
) -> None:
    pytest.importorskip("xllamacpp")

    def refuse(params: Any) -> None:
        raise RuntimeError("no such file")

    monkeypatch.setattr(llamacpp_server, "_kept_server", refuse)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    host = llamacpp_server.make_host(read(), EngineContext("w"), timeout_s)
    with pytest.raises(WorkerStartFailed):
        await host.start()
    assert ("start-timeout has no effect" in caplog.text) is (timeout_s is not None)
