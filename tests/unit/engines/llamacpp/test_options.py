"""The options of llama.cpp: what they mean, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from dynaplan.engines.llamacpp import engine, kind
from dynaplan.engines.llamacpp import options as llamacpp_options
from dynaplan.engines.llamacpp.options import LlamaOptions, read_options
from dynaplan.util.errors import ConfigError

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
    assert both.knobs == read(batch_size=64).knobs == read(max_num_batched_tokens=64).knobs
    assert read().knobs["max-num-batched-tokens"] == 512


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
    for check in (engine.check, kind.check):
        with pytest.raises(ConfigError, match=named):
            check(section, 1)
