"""Configurations as llama-swap describes them: docs/config.example.yaml, config-schema.json."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from dynaplan.models.files import llama_swap
from dynaplan.models.files.imported_model import ImportedFile, ImportedModel, RequestFilters
from dynaplan.util.errors import ConfigError

DOCUMENTED = """
healthCheckTimeout: 90
globalTTL: 300
logLevel: info
sendLoadingState: true
startPort: 10001
macros:
  llama: >
    /opt/llama/llama-server
    --host 127.0.0.1 --port ${PORT}
  ctx: 4096
  common: "--ctx-size ${ctx} -ngl 99"
  models: "${env.MODELS}/gguf"
apiKeys:
  - sk-one
  - "${env.KEY}"
models:
  qwen:
    macros: {ctx: 16384, temp: 0.7}
    cmd: |
      # the server of the macro
      ${llama}
      --model ${models}/qwen.gguf ${common}
      --flash-attn on --no-mmap -np 2
    name: Qwen
    ttl: 60
    aliases: [gpt-4o-mini, {id: coder, name: Coder}]
    env: ["GGML_LOG=1", "CUDA_VISIBLE_DEVICES=0,1"]
    filters:
      stripParams: "top_p, top_k, model"
      setParams: {temperature: "${temp}", model: no}
      setParamsByID:
        "${MODEL_ID}": {reasoning: medium}
        "${MODEL_ID}:high": {reasoning: high}
    concurrencyLimit: 4
    metadata: {port: "${PORT}", temperature: "${temp}"}
  big:
    cmd: vllm serve /models/big --port ${PORT} -tp 2 --max-model-len 32768 --enable-prefix-caching
    ttl: 0
  whisper:
    cmd: docker run --rm --name ${MODEL_ID} -p ${PORT}:8080 'some image'
    cmdStop: docker stop ${MODEL_ID} ${PID}
    proxy: http://127.0.0.1:9000
    checkEndpoint: /ready
    useModelName: openai/whisper
    unlisted: true
hooks:
  on_startup:
    preload: [qwen]
"""


def read(text: str, **environment: str) -> ImportedFile:
    document = yaml.safe_load(text)
    assert llama_swap.is_config(document)
    return llama_swap.read(document, environment)


def documented() -> ImportedFile:
    return read(DOCUMENTED, MODELS="/srv", KEY="sk-two")


def test_a_llama_server_is_recognised_as_the_engine_with_its_flags() -> None:
    assert documented().models["qwen"].options == {
        "engine": "llamacpp",
        "llama-server": "/opt/llama/llama-server",
        "model": "/srv/gguf/qwen.gguf",
        "ctx-size": 16384,
        "n-gpu-layers": 99,
        "flash-attn": "on",
        "mmap": False,
        "parallel": 2,
        "ttl": 60,
        "load-timeout": 90,
        "ServiceArgs": {"envs": {"GGML_LOG": "1", "CUDA_VISIBLE_DEVICES": "0,1"}},
        "aliases": ["gpt-4o-mini", "coder", "qwen:high"],
    }


def test_a_vllm_serve_is_recognised() -> None:
    assert documented().models["big"].options == {
        "engine": "vllm",
        "model": "/models/big",
        "tensor-parallel-size": 2,
        "max-model-len": 32768,
        "enable-prefix-caching": True,
        "ttl": 0,
        "load-timeout": 90,
    }


def test_any_other_command_stays_one_with_its_port_and_stop() -> None:
    assert documented().models["whisper"] == ImportedModel(
        {
            "command": "docker run --rm --name whisper -p '${PORT}:8080' 'some image'",
            "check": "/ready",
            "ttl": 300,
            "load-timeout": 90,
        },
        stop_command="docker stop whisper ${PID}",
        upstream_name="openai/whisper",
        is_unlisted=True,
    )


def test_a_command_without_a_check_is_ready_when_its_port_answers() -> None:
    found = read("models: {a: {cmd: 'serve-it --port ${PORT}', checkEndpoint: none}}")
    assert found.models["a"].options["check"] == "/v1/models"
    assert "models.a.checkEndpoint: none: it is ready when it answers /v1/models." in found.notes


def test_filters_are_read_and_change_a_request_but_never_its_model() -> None:
    filters = documented().models["qwen"].filters
    assert filters == RequestFilters(
        ("top_p", "top_k"),
        {"temperature": 0.7},
        {"qwen": {"reasoning": "medium"}, "qwen:high": {"reasoning": "high"}},
    )
    request = {"model": "qwen:high", "top_k": 5, "temperature": 2, "messages": []}
    assert filters.apply(request) == {
        "model": "qwen:high",
        "temperature": 0.7,
        "messages": [],
        "reasoning": "high",
    }
    assert filters.apply({"top_p": 1}) == {"temperature": 0.7}


def test_keys_preload_and_what_has_no_meaning_here() -> None:
    imported = documented()
    assert imported.api_keys == ("sk-one", "sk-two")
    assert imported.preload == ("qwen",)
    assert [note.partition(": ")[0] for note in imported.notes] == [
        "logLevel",
        "startPort",
        "sendLoadingState",
        "models.qwen.name",
        "models.qwen.metadata",
        "models.qwen.concurrencyLimit",
        "models.whisper.proxy",
        "whisper",
    ]


def test_a_port_that_is_written_in_proxy_and_command_becomes_one_that_is_leased() -> None:
    def read_one(cmd: str, proxy: str) -> ImportedModel:
        return read(f"models: {{a: {{cmd: '{cmd}', proxy: '{proxy}'}}}}").models["a"]

    found = read_one("serve -p 9503:8080 --seed 19503", "http://localhost:9503/")
    assert (found.options["command"], found.url) == ("serve -p '${PORT}:8080' --seed 19503", "")
    twice = read_one("serve -p 9503 --seed 9503", "http://localhost:9503")
    assert twice.url == "http://localhost:9503"


def test_a_proxy_at_the_port_of_the_command_is_where_we_look_anyway() -> None:
    text = "models: {a: {cmd: 'server ${PORT}', proxy: 'http://127.0.0.1:${PORT}'}}"
    assert read(text).models["a"].url == ""


def test_without_a_ttl_or_a_health_check_timeout_nothing_is_put_away_and_our_timeout_stands() -> None:
    options = read("models: {a: {cmd: server}}").models["a"].options
    assert options == {"command": "server", "check": "/health", "ttl": 0}
    short = "{healthCheckTimeout: 1, models: {a: {cmd: server}}}"
    assert read(short).models["a"].options["load-timeout"] == 15


# What may be loaded together

MODELS = "models: {a: {cmd: s}, b: {cmd: s}, c: {cmd: s}, d: {cmd: s}, e: {cmd: s}}\n"


def leaves(text: str) -> dict[str, str]:
    return {name: "".join(sorted(gone)) for name, gone in read(MODELS + text).constraints.leaves.items()}


GROUPS = (
    "{swap1: {members: [a, b]}, kept: {swap: false, exclusive: false, persistent: true, members: [c, d]}}"
)


@pytest.mark.parametrize(
    "text",
    [f"groups: {GROUPS}", f"routing: {{router: {{use: group, settings: {{groups: {GROUPS}}}}}}}"],
    ids=["at the top", "below routing"],
)
def test_groups_say_who_leaves_for_whom(text: str) -> None:
    """One of a swapping group at a time; an exclusive group ends the others, but not a persistent one."""
    assert leaves(text) == {"a": "be", "b": "ae", "e": "ab"}


def test_a_group_that_neither_swaps_nor_is_exclusive_lets_all_stay() -> None:
    every = "groups: {all: {swap: false, exclusive: false, members: [a, b, c, d, e]}}"
    assert leaves(every) == {}


def test_without_groups_commands_of_unknown_memory_are_alone_and_engines_share() -> None:
    text = "models: {a: {cmd: s}, b: {cmd: llama-server -m b.gguf}, c: {cmd: llama-server -m c.gguf}}"
    imported = read(text)
    assert imported.constraints.leaves == {"a": {"b", "c"}, "b": {"a"}, "c": {"a"}}
    assert "a: loaded alone, as in llama-swap without groups" in imported.notes[-1]
    assert read(text.replace("cmd: s}", "cmd: llama-server -m a.gguf}")).constraints.leaves == {}


MATRIX = """
  vars: {x: a}
  evict_costs: {x: 50, b: 3}
  sets:
    llms: (x | b)
    chat: +llms & c
    alone: d
"""


@pytest.mark.parametrize(
    "text",
    [
        f"matrix:{MATRIX}",
        "routing:\n  router:\n    use: matrix\n    settings:\n      matrix:"
        + MATRIX.replace("\n", "\n      "),
    ],
    ids=["at the top", "below routing"],
)
def test_a_matrix_says_which_sets_may_be_loaded_together_and_what_each_is_worth(text: str) -> None:
    imported = read(MODELS + text)
    together = ["".join(sorted(each)) for each in imported.constraints.together]
    assert together == ["a", "b", "ac", "bc", "d"]
    assert {name: model.options.get("priority") for name, model in imported.models.items()} == {
        **dict.fromkeys("cde"),
        "a": 50,
        "b": 3,
    }


# Mistakes


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("modelz: {}\nmodels: {a: {cmd: s}}", r"modelz: llama-swap has no such key(?s:.*)'models'"),
        ("models: {a: {cmd: s, tll: 1}}", r"models.a.tll: llama-swap has no such key(?s:.*)'ttl'"),
        ("models: {a: {cmd: ''}}", r"models.a.cmd is empty"),
        ('models: {a: {cmd: "s \'x"}}', r"models.a.cmd: No closing quotation"),
        ("models: {a: {cmd: '${llma}'}}\nmacros: {llama: x}", r"models.a.cmd: no macro is called 'llma'"),
        ("models: {a: {cmd: '${x}'}}\nmacros: {x: '${y}', y: '${x}'}", r"contains itself\s+x -> y -> x"),
        ("models: {a: {cmd: '${env.NONE}'}}", r"the environment has no NONE"),
        ("models: {a: {cmd: s, ttl: -2}}", r"models.a.ttl = -2"),
        ("models: {a: {cmd: s, ttl: true}}", r"models.a.ttl = True"),
        ("models: {a: {cmd: s, env: [X]}}", r"models.a.env: 'X'\s+Expected NAME=value"),
        ("models: {a: {cmd: s, aliases: gpt-4}}", r"models.a.aliases = 'gpt-4'\s+Expected a list"),
        ("models: {a: {cmd: s, env: X}}", r"models.a.env = 'X'\s+Expected a list"),
        ("models: {a: {cmd: s, filters: [1]}}", r"models.a.filters = \[1\]\s+Expected a mapping"),
        (MODELS + "groups: {g: {members: [z]}}", r"groups.g.members: no model is called 'z'"),
        (MODELS + "groups: {g: {members: [a]}, h: {members: [a]}}", r"'a' is in two groups"),
        (MODELS + "groups: {g: {members: [a]}}\nmatrix: {sets: {s: a}}", r"both groups and matrix"),
        (MODELS + "groups: {g: {members: [a]}}\nrouting: {}", r"both routing and groups"),
        (MODELS + "matrix: {vars: {x: z}}", r"matrix.vars.x: no model is called 'z'"),
        (MODELS + "matrix: {evict_costs: {z: 1}}", r"matrix.evict_costs: no model is called 'z'"),
        (MODELS + "matrix: {sets: {s: a &}}", r"matrix.sets.s = 'a &': a model is missing at the end"),
        (MODELS + "matrix: {sets: {s: (a | b}}", r"a parenthesis is not closed"),
        (MODELS + "matrix: {sets: {s: a b}}", r"'b' is one too many"),
        (MODELS + "matrix: {sets: {s: a ^ b}}", r"'\^' has no meaning"),
        (MODELS + "matrix: {sets: {s: '& a'}}", r"a model is missing before '&'"),
        (MODELS + "matrix: {sets: {s: z}}", r"no model is called 'z'"),
        (MODELS + "matrix: {sets: {s: +t}}", r"no set is called 't'"),
        (MODELS + "matrix: {sets: {s: +t, t: +s}}", r"refers to itself\s+s -> t -> s"),
        (MODELS + "hooks: {on_startup: {preload: [z]}}", r"hooks.on_startup.preload: no model is called 'z'"),
    ],
)
def test_a_mistake_names_its_key_and_what_was_expected(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(text)


def test_an_expression_of_too_many_sets_is_refused() -> None:
    names = [f"m{index}" for index in range(10)]
    models: dict[str, Any] = {name: {"cmd": "s"} for name in names}
    any_of = f"({' | '.join(names)})"
    sets = {"s": " & ".join([any_of] * 5)}
    with pytest.raises(ConfigError, match="more than 10000 sets"):
        llama_swap.read({"models": models, "matrix": {"sets": sets}}, {})


@pytest.mark.parametrize(
    "text", ["[]", "models: []", "models: {a: {model: x}}", "Models: {a: {cmd: x}}", "3"]
)
def test_other_documents_are_not_taken_for_a_configuration_of_llama_swap(text: str) -> None:
    assert not llama_swap.is_config(yaml.safe_load(text))
