"""Commands as their owners wrote them: what is recognised, and the line that is run."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from dynaplan.config.command_words import (
    effective_options,
    engine_command,
    launch_argv,
    read_command,
    recognise,
)
from dynaplan.config.parallelism import gpus_needed
from dynaplan.util.errors import ConfigError

ADDRESS = ("127.0.0.1", "7001")


def line(text: str, *added: tuple[str, ...]) -> str:
    command = read_command(text)
    found = recognise(command.words)
    assert found is not None
    return " ".join(launch_argv(command, found, ADDRESS, added))


@pytest.mark.parametrize(
    ("command", "run"),
    [
        (
            "llama-server -m a.gguf -c 4096 -ngl 30",
            "llama-server -m a.gguf -c 4096 -ngl 30 --host 127.0.0.1 --port 7001",
        ),
        (
            "llama-server --port ${PORT} -m a.gguf --host 0.0.0.0 --temp 0.7",
            "llama-server --port 7001 -m a.gguf --host 127.0.0.1 --temp 0.7",
        ),
        (
            "llama-server -c 4096 --port=1 -m a.gguf -c 8192 --port 2",
            "llama-server -c 4096 --port 7001 -m a.gguf -c 8192 --port 7001 --host 127.0.0.1",
        ),
        (
            "llama-server -m a.gguf --api-key sk-1 --api-prefix /x -n -1",
            "llama-server -m a.gguf -n -1 --host 127.0.0.1 --port 7001",
        ),
        (
            "nice -n 5 numactl -N 0 /ik/llama-server-b1 -m a.gguf -fmoe -rtr",
            "nice -n 5 numactl -N 0 /ik/llama-server-b1 -m a.gguf -fmoe -rtr --host 127.0.0.1 --port 7001",
        ),
        (
            "uv run vllm serve org/m --port ${PORT} --tensor-parallel-size 2",
            "uv run vllm serve org/m --port 7001 --tensor-parallel-size 2 --host 127.0.0.1",
        ),
        (
            "python3 -m sglang.launch_server --model-path org/m --tp 2",
            "python3 -m sglang.launch_server --model-path org/m --tp 2 --host 127.0.0.1 --port 7001",
        ),
    ],
)
def test_the_owners_words_stand_in_his_order_and_only_the_address_is_ours(command: str, run: str) -> None:
    assert line(command) == run


def test_what_is_added_is_left_out_where_the_owner_has_set_it() -> None:
    added = (("--alias", "ours"), ("--metrics",), ("--slot-save-path", "/shm/"))
    ending = "--host 127.0.0.1 --port 7001"
    assert line("llama-server -m a.gguf", *added) == (
        f"llama-server -m a.gguf {ending} --alias ours --metrics --slot-save-path /shm/"
    )
    assert line("llama-server -a his --metrics -m a.gguf --slot-save-path /his", *added) == (
        f"llama-server -a his --metrics -m a.gguf --slot-save-path /his {ending}"
    )


@pytest.mark.parametrize(
    ("command", "engine", "model", "flags"),
    [
        ("llama-server -m a.gguf -c 4096 --warmup false", "llamacpp", "a.gguf", {"ctx-size": 4096}),
        ("/opt/llama-server --model=a.gguf -n -1", "llamacpp", "a.gguf", {"n-predict": -1}),
        ("llama-server -m a.gguf -c 1 -c 2", "llamacpp", "a.gguf", {"ctx-size": 2}),
        ("llama-server -m a --lora x --lora y", "llamacpp", "a", {"lora": ["x", "y"]}),
        ("llama-server -m a -no-kvu --no-mmap", "llamacpp", "a", {"kv-unified": False, "mmap": False}),
        ("llama-server -hf org/m:Q4_K_M", "llamacpp", "org/m:Q4_K_M", {}),
        ("llama-server -m a.gguf -unknown 3 words", "llamacpp", "a.gguf", {"unknown": 3}),
        ("vllm serve org/model -tp 2", "vllm", "org/model", {"tensor-parallel-size": 2}),
        ("vllm serve --model m --served-model-name x", "vllm", "m", {"served-model-name": "x"}),
        ("/venv/bin/vllm serve m --no-enable-prefix-caching", "vllm", "m", {"enable-prefix-caching": False}),
        ("python3 -m vllm.entrypoints.openai.api_server --model m", "vllm", "m", {}),
        ("sglang serve --model-path m --tp-size 4", "sglang", "m", {"tp-size": 4}),
        ("env A=b llama-server -m a.gguf", "llamacpp", "a.gguf", {}),
    ],
)
def test_an_engine_is_recognised_with_its_model_and_what_its_flags_say(
    command: str, engine: str, model: str, flags: dict[str, Any]
) -> None:
    found = recognise(shlex.split(command))
    assert found is not None
    assert (found.engine, found.model) == (engine, model)
    assert flags.items() <= found.flags.items()


@pytest.mark.parametrize(
    "command",
    [
        "",
        "docker run -p ${PORT}:8080 image llama-server -m a.gguf",
        "bash -c 'llama-server -m a.gguf --port ${PORT}'",
        "llama-server",
        "llama-server --models-preset models.ini --port ${PORT}",
        "llama-server -m a.gguf --sleep-idle-seconds 60",
        "vllm bench",
        "vllm serve --config x.yaml",
        "python3 -m other --model m",
        "mlx_lm.server --model m",
        "koboldcpp --model m.gguf",
    ],
)
def test_what_is_not_recognised_is_a_command_and_nothing_else(command: str) -> None:
    assert recognise(shlex.split(command)) is None


def test_assignments_before_the_program_are_its_environment() -> None:
    command = read_command("OLLAMA_HOST=127.0.0.1:${PORT} 'X=a b' ollama serve --y=1")
    assert command.words == ("ollama", "serve", "--y=1")
    assert command.environment == {"OLLAMA_HOST": "127.0.0.1:${PORT}", "X": "a b"}
    assert read_command(["A=1", "llama-server"]).environment == {"A": "1"}
    assert read_command(None).words == ()


def test_a_comment_ends_with_its_line_and_a_backslash_joins_lines() -> None:
    text = """
    # the new one's build
    llama-server --port ${PORT} \\
      -m /m/a#1.gguf  # "the small one
      --samplers "top_k;#x" 'it''s #1'
    """
    assert read_command(text).words == (
        *("llama-server", "--port", "${PORT}", "-m", "/m/a#1.gguf", "--samplers", "top_k;#x", "its #1"),
    )


@pytest.mark.parametrize("value", ["serve 'a", 5, ["serve", 5], {"a": 1}])
def test_what_is_no_command_is_refused_with_the_options_name(value: object) -> None:
    with pytest.raises(ConfigError, match="stop-command is"):
        read_command(value, "stop-command")


def test_a_command_states_options_and_those_of_its_worker_come_before_them() -> None:
    options = {"command": "vllm serve org/m -tp 2 --max-model-len 512", "max-model-len": 1024}
    stated = effective_options(options)
    assert (stated["model"], stated["tensor-parallel-size"], stated["max-model-len"]) == ("org/m", 2, 1024)
    assert gpus_needed(options, 1) == 2


def test_llama_servers_variables_state_what_its_flags_leave_open() -> None:
    options = {
        "command": "LLAMA_ARG_BATCH=64 llama-server -m a.gguf -ngl 5",
        "ServiceArgs": {"envs": {"LLAMA_ARG_N_GPU_LAYERS": "0", "LLAMA_ARG_CTX_SIZE": "8192", "X": "1"}},
    }
    stated = effective_options(options)
    assert (stated["n-gpu-layers"], stated["ctx-size"], stated["batch-size"]) == (5, 8192, 64)


def test_a_command_of_another_engine_than_the_one_that_is_named_is_none_of_it() -> None:
    assert engine_command({"engine": "vllm", "command": "llama-server -m a.gguf"}) is None
    assert engine_command({"engine": "command", "command": "llama-server -m a.gguf"}) is None
    assert effective_options({"engine": "llamacpp", "ctx-size": 5}) == {"engine": "llamacpp", "ctx-size": 5}
