from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from dynaplan.util.masking import (
    MASK,
    looks_secret,
    mask_all,
    mask_config,
    mask_secrets,
    mask_variables,
)


@pytest.mark.parametrize("name", ["HF_TOKEN", "api-key", "password", "hfToken"])
def test_a_name_with_a_word_for_a_secret_looks_secret(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize("name", ["max-tokens", "keyboard", "model"])
def test_a_name_without_one_does_not(name: str) -> None:
    assert not looks_secret(name)


@pytest.mark.parametrize(
    ("value", "masked"),
    [
        ({"a": 1, "b": {"c": "d"}}, {"a": MASK, "b": {"c": MASK}}),
        (["a", ("b", 2)], [MASK, [MASK, MASK]]),
        ("a", MASK),
    ],
)
def test_masking_everything_keeps_the_structure_and_the_keys(value: Any, masked: Any) -> None:
    assert mask_all(value) == masked


@pytest.mark.parametrize(
    ("value", "masked"),
    [
        ({"api-key": ["a", "b"], "model": "m"}, {"api-key": [MASK, MASK], "model": "m"}),
        (
            {"ServiceArgs": {"envs": {"CUDA_VISIBLE_DEVICES": "1", "HF_TOKEN": "b"}, "workers": 2}},
            {"ServiceArgs": {"envs": {"CUDA_VISIBLE_DEVICES": "1", "HF_TOKEN": MASK}, "workers": 2}},
        ),
        (["--api-key", "a", "--model", "m"], ["--api-key", MASK, "--model", "m"]),
        (["--api-key=a"], [f"--api-key={MASK}"]),
        ("nats://user:word@host:1", f"nats://{MASK}@host:1"),
        (7, 7),
    ],
)
def test_only_the_secrets_of_a_document_are_masked(value: Any, masked: Any) -> None:
    assert mask_secrets(value) == masked


@pytest.mark.parametrize(
    ("command", "masked"),
    [
        (
            "docker run -e HF_HOME=/x -e CUDA_VISIBLE_DEVICES=1 --env=A=b -e C image --token s -p '${PORT}'",
            "docker run -e 'HF_HOME=***' -e CUDA_VISIBLE_DEVICES=1 '--env=A=***' -e C image --token '***' "
            "-p '${PORT}'",
        ),
        ("HF_TOKEN=a LLAMA_ARG_CTX_SIZE=5 serve", "'HF_TOKEN=***' LLAMA_ARG_CTX_SIZE=5 serve"),
        ("llama-server -hft a -e -m b", "llama-server -hft '***' -e -m b"),
        (
            "bash -c 'export API_KEY=a; serve --api-key b'",
            shlex.join(["bash", "-c", "export 'API_KEY=***' serve --api-key '***'"]),
        ),
        ("serve --port ${PORT} # the 'first", "serve --port ${PORT} # the 'first"),
        ("serve   --max-tokens 5", "serve   --max-tokens 5"),
    ],
)
def test_secrets_of_a_command_are_masked_and_its_other_words_stay(command: str, masked: str) -> None:
    assert mask_secrets({"command": command, "stop-command": command}) == {
        "command": masked,
        "stop-command": masked,
    }
    assert mask_secrets({"about": command}) == {"about": command}


def test_a_service_or_a_model_may_be_called_like_a_secret() -> None:
    config = {"Models": {"token": {"ttl": 5, "api-key": "a"}}, "token": {"ttl": 5, "hf-token": "a"}}
    assert mask_config(config) == {
        "Models": {"token": {"ttl": 5, "api-key": MASK}},
        "token": {"ttl": 5, "hf-token": MASK},
    }


KV_EVENTS = '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","topic":"kv@prefill"}'
KV_TRANSFER = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_ip": "10.0.0.1"}'


@pytest.mark.parametrize(
    "value",
    [
        KV_EVENTS,
        KV_TRANSFER,
        f"--kv-events-config={KV_EVENTS}",
        f"vllm serve m --kv-events-config '{KV_EVENTS}' --port 8000",
        json.dumps({"cmd": f"--kv-events-config={KV_EVENTS}"}),
        json.loads(KV_EVENTS),
        ["--kv-events-config", KV_EVENTS],
        "tcp://*:5557",
        "git@github.com:some/repository.git",
        "s3://bucket/model@v2",
        "http://127.0.0.1:8000/v1?mail=a@b",
        "{'endpoint':'tcp://*:5557','topic':'kv@prefill'}",
        "[1, 2, 3]",
        "{not json}",
        "[" * 100_000,
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_without_a_secret_stays_as_it_is_written(value: Any) -> None:
    assert mask_secrets(value) == value


@pytest.mark.parametrize(
    ("value", "masked"),
    [
        ("https://hf_abc@huggingface.co/m", f"https://{MASK}@huggingface.co/m"),
        ("redis://:word@host:6379/0", f"redis://{MASK}@host:6379/0"),
        ("postgres://u:p%40ss@h/db", f"postgres://{MASK}@h/db"),
        ("nats://u:it's\"so@h", f"nats://{MASK}@h"),
        ("http://a:b@h,http://c:d@h", f"http://{MASK}@h,http://{MASK}@h"),
        ('{"api_key": "a", "topic": "kv@prefill"}', f'{{"api_key": "{MASK}", "topic": "kv@prefill"}}'),
        ('{"a":"tcp://u:w@h","b":"c@d"}', f'{{"a": "tcp://{MASK}@h", "b": "c@d"}}'),
        ("--endpoint=tcp://u:w@h", f"--endpoint=tcp://{MASK}@h"),
        ("x {'a':'tcp://u:w@h','b':'c@d'}", f"x {{'a':'tcp://{MASK}@h','b':'c@d'}}"),
    ],
)
def test_a_secret_in_a_url_or_a_json_text_is_masked_and_nothing_beside_it(value: str, masked: str) -> None:
    assert mask_secrets(value) == masked


def test_in_a_file_every_variable_of_a_worker_is_masked_whatever_its_name() -> None:
    config = {"Worker": {"ServiceArgs": {"envs": {"SOME_NAME": "x"}, "workers": 2}, "envs": "a text"}}
    assert mask_variables(config) == {
        "Worker": {"ServiceArgs": {"envs": {"SOME_NAME": "***"}, "workers": 2}, "envs": "a text"}
    }
