"""Configurations as llama-swap describes them: docs/config.example.yaml, config-schema.json."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

from dynaplan.models.files import llama_swap
from dynaplan.models.files.imported_model import ImportedFile, ImportedModel, RequestFilters
from dynaplan.models.files.llama_swap import FoldedText
from dynaplan.util.errors import ConfigError, SeveralErrors

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
    description: for ${MODEL_ID}
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
    proxy: http://127.0.0.1:9000/api/
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


def noted(found: ImportedFile) -> list[str]:
    return sorted(note.partition(": ")[0] for note in found.notes)


def documented() -> ImportedFile:
    return read(DOCUMENTED, MODELS="/srv", KEY="sk-two")


def test_a_command_stands_with_its_macros_put_in() -> None:
    assert documented().models["qwen"].options == {
        "command": "/opt/llama/llama-server --host 127.0.0.1 --port '${PORT}' --model /srv/gguf/qwen.gguf "
        "--ctx-size 16384 -ngl 99 --flash-attn on --no-mmap -np 2",
        "ttl": 60,
        "load-timeout": 90,
        "ServiceArgs": {"envs": {"GGML_LOG": "1", "CUDA_VISIBLE_DEVICES": "0,1"}},
        "aliases": ["gpt-4o-mini", "coder", "qwen:high"],
        "display-name": "Qwen",
        "description": "for qwen",
        "metadata": {"port": "${PORT}", "temperature": 0.7},
        "concurrency-limit": 4,
    }
    assert documented().models["big"].options["command"].startswith("vllm serve /models/big --port")


def test_any_other_command_stays_one_with_its_port_and_stop() -> None:
    assert documented().models["whisper"] == ImportedModel(
        {
            "command": "docker run --rm --name whisper -p '${PORT}:8080' 'some image'",
            "check": "/ready",
            "ttl": 300,
            "load-timeout": 90,
        },
        url="http://127.0.0.1:9000/api",
        stop_command="docker stop whisper ${PID}",
        upstream_name="openai/whisper",
        is_unlisted=True,
    )


def test_a_command_without_a_check_is_ready_when_it_answers() -> None:
    found = read("models: {a: {cmd: 'serve-it --port ${PORT}', checkEndpoint: none}}")
    assert (found.models["a"].options["check"], found.notes) == ("none", ())


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
    assert noted(imported) == ["logLevel", "sendLoadingState", "startPort", "whisper"]


def test_what_is_set_where_the_client_has_not_keeps_its_mark_and_is_set_only_then() -> None:
    text = """
models:
  a:
    cmd: server ${PORT}
    filters:
      strip_params: min_p
      setParams: {"top_k?": 40, seed: 1, "seed?": 2, "model?": b}
      setParamsByID: {"a:hot": {"temperature?": 2}}
      setParamsByMatch:
      - {key: reasoning_effort, match: none, set: {chat_template_kwargs: {enable_thinking: false}}}
      - {key: think, match: "true", set: {top_k: 1}}
"""
    filters = read(text).models["a"].filters
    asked = {"model": "a:hot", "min_p": 1, "think": True, "chat_template_kwargs": {"tools": 1}}
    assert filters.apply(asked) == {
        "model": "a:hot",
        "think": True,
        "chat_template_kwargs": {"tools": 1},
        "top_k": 1,
        "seed": 1,
        "temperature": 2,
    }
    changed = filters.apply({**asked, "reasoning_effort": "none", "think": False, "temperature": 0})
    assert changed["chat_template_kwargs"] == {"tools": 1, "enable_thinking": False}
    assert filters.set_in(changed) == {"seed", "top_k"}
    assert (changed["top_k"], changed["temperature"]) == (40, 0)


@pytest.mark.parametrize(
    ("cmd", "words"),
    [
        (
            "|\n      # ${old}\n      serve --port ${PORT}  # don't\n      --name 'a # b'",
            ["serve", "--port", "${PORT}", "--name", "a # b"],
        ),
        (
            "|\n      serve \\  \n      --color #fff x\n      -p ${PORT} \\",
            ["serve", "--color", "-p", "${PORT}"],
        ),
        ("${base} -v", ["run", "-p", "${PORT}", "-v"]),
        ("serve a#b ${list} ${PORT}", ["serve", "a#b", "true", "${PORT}"]),
    ],
    ids=["lines and ends of lines", "continued lines", "of a macro", "within a word"],
)
def test_comments_of_commands_go_before_macros_are_put_in(cmd: str, words: list[str]) -> None:
    macros = 'macros: {base: "run\\n  # ${gone}\\n -p ${PORT} # ${gone}\\n", list: true}'
    found = read(f"{macros}\nmodels:\n  a:\n    cmd: {cmd}\n").models["a"].options["command"]
    assert shlex.split(found) == words


def test_a_comment_in_a_folded_command_ends_where_its_line_was_written_to_end() -> None:
    text = FoldedText("serve --port ${PORT} # leased -c 1")
    text.lines = "serve --port ${PORT} # leased\n  -c 1\n"
    found = llama_swap.read({"models": {"a": {"cmd": text}}}, {}).models["a"]
    assert found.options["command"] == "serve --port '${PORT}' -c 1"


def test_macros_may_be_lists_and_mappings_and_stand_in_others_in_any_order() -> None:
    text = """
macros:
  all: "${one} -v"
  one: "serve ${PORT} ${MODEL_ID}"
  stops: [a, "${MODEL_ID}"]
  more: {n: "${number}"}
  number: 3
models:
  b:
    cmd: "${all}"
    env: ["X=${unknown}", "Y=${number}", Z]
    filters: {setParams: {stop: "${stops}", more: "${more}"}}
"""
    found = read(text)
    model = found.models["b"]
    assert model.options["command"] == "serve '${PORT}' b -v"
    assert model.options["ServiceArgs"] == {"envs": {"X": "${unknown}", "Y": "3"}}
    assert model.filters.set == {"stop": ["a", "b"], "more": {"n": 3}}
    assert found.notes == ("models.b.env: 'Z' is left out: expected NAME=value.",)


def test_a_port_of_the_owners_stays_as_it_is_written_and_one_runs_at_a_time_on_it() -> None:
    found = read("""
models:
  a: {cmd: "docker run -p 9501:9501 image --port 9501", proxy: "http://localhost:9501"}
  b: {cmd: "serve 9501", proxy: "http://127.0.0.1:9501/"}
  c: {cmd: "serve ${PORT}", proxy: "http://127.0.0.1:${PORT}"}
  d: {cmd: "ssh other serve", proxy: "http://other:80/v2"}
groups: {all: {swap: false, exclusive: false, members: [a, b, c, d]}}
""")
    assert [found.models[name].url for name in "abcd"] == [
        "http://localhost:9501",
        "http://127.0.0.1:9501",
        "",
        "http://other:80/v2",
    ]
    assert found.models["a"].options["command"] == "docker run -p 9501:9501 image --port 9501"
    assert found.constraints.leaves == {"a": {"b"}, "b": {"a"}}
    assert noted(found) == ["models.a.proxy", "models.b.proxy"]


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


def test_a_model_may_be_named_by_an_alias_and_members_of_a_group_by_its_name() -> None:
    text = """
models: {a: {cmd: s, aliases: [fast]}, b: {cmd: s}, c: {cmd: s}, d: {cmd: s}}
groups: {pair: {members: [fast, b], swap: false}}
hooks: {on_startup: {preload: [pair, " c", fast]}}
"""
    found = read(text)
    assert found.preload == ("a", "b", "c")
    assert {name: set(gone) for name, gone in found.constraints.leaves.items()} == {
        "a": {"c", "d"},
        "b": {"c", "d"},
        "c": {"a", "b", "d"},
        "d": {"a", "b", "c"},
    }
    matrix = (
        "models: {a: {cmd: s, aliases: [x]}, b: {cmd: s}}\nmatrix: {evict_costs: {x: 5}, sets: {s: x & b}}"
    )
    assert read(matrix).constraints.together == (frozenset("ab"),)
    assert read(matrix).models["a"].options["priority"] == 5


def together(sets: str) -> list[str]:
    found = read(f"models: {{a: {{cmd: s}}, b: {{cmd: s}}, c: {{cmd: s}}}}\nmatrix: {{sets: {sets}}}")
    return ["".join(sorted(each)) for each in found.constraints.together]


def test_undefined_stands_for_each_model_that_no_set_names() -> None:
    assert together('{base: a, rest: "+undefined & +base"}') == ["a", "ab", "ac"]
    assert together('{all: a & b & c, rest: "+undefined & a"}') == ["abc", "a"]
    assert together('{undefined: a, rest: "+undefined & b"}') == ["a", "ab"]


NO_KEY = "llama-swap has no such key, and it changes nothing."


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (
            "modelz: {}\nmodels: {a: {cmd: s}}",
            f"modelz: {NO_KEY} Did you mean 'models'?",
        ),
        ("models: {a: {cmd: s}}\nhost: 0.0.0.0", f"host: {NO_KEY}"),
        (
            "models: {a: {cmd: s, aliasses: 1}}",
            f"models.a.aliasses: {NO_KEY} Did you mean 'aliases'?",
        ),
        (
            "models: {a: {cmd: s, filters: {setParam: {}}}}",
            f"models.a.filters.setParam: {NO_KEY} Did you mean 'setParams'?",
        ),
        (
            "models: {a: {cmd: s}}\npeer: {b: {proxy: 'http://b', models: [c]}}",
            "peer: models of other services are not served here: ask them at their own address.",
        ),
        (
            "models: {a: {cmd: s}}\nrouting: {scheduler: {use: fifo}}",
            "routing.scheduler: a model's requests are served together, and none waits without end.",
        ),
        (
            MODELS + "groups: {g: {members: [z]}}",
            "groups.g.members: no model is called 'z', so it is left out.",
        ),
        (
            MODELS + "matrix: {vars: {x: z}, sets: {s: x & a}}",
            "matrix.vars.x: no model is called 'z', so it is left out.",
        ),
        (
            MODELS + "matrix: {evict_costs: {z: 1}}",
            "matrix.evict_costs: no model is called 'z', so it is left out.",
        ),
        (MODELS + "matrix: {sets: {s: z}}", "matrix.sets.s: no model is called 'z', so it is left out."),
        (
            MODELS + "hooks: {on_startup: {preload: [z]}}",
            "hooks.on_startup.preload: no model is called 'z', so it is left out.",
        ),
    ],
)
def test_what_llama_swap_would_pass_over_is_a_note(text: str, note: str) -> None:
    assert note in read(text).notes


# Mistakes


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("models: {a: {cmd: ''}}", r"models.a.cmd is empty"),
        ("models: {a: {cmd: [s, -m, x]}}", r"models.a.cmd = \['s', '-m', 'x'\]\s+Expected .*as one text"),
        ("models: {a: {cmd: s, cmdStop: {x: y}}}", r"models.a.cmdStop = .*\s+Expected .*as one text"),
        ('models: {a: {cmd: "s \'x"}}', r"models.a.cmd is .*No closing quotation"),
        ("models: {a: {cmd: '${llma}'}}\nmacros: {llama: x}", r"models.a.cmd: no macro is called 'llma'"),
        ("models: {a: {cmd: '${x}'}}\nmacros: {x: '${y}', y: '${x}'}", r"contains itself\s+x -> y -> x"),
        ("models: {a: {cmd: '${env.NONE}'}}", r"the environment has no NONE"),
        ("models: {a: {cmd: s, ttl: -2}}", r"models.a.ttl = -2"),
        ("models: {a: {cmd: s, ttl: true}}", r"models.a.ttl = True"),
        ("models: {a: {cmd: s, aliases: gpt-4}}", r"models.a.aliases = 'gpt-4'\s+Expected a list"),
        ("models: {a: {cmd: s, env: X}}", r"models.a.env = 'X'\s+Expected a list"),
        ("models: {a: {cmd: s, filters: [1]}}", r"models.a.filters = \[1\]\s+Expected a mapping"),
        (MODELS + "groups: {g: {members: [a]}, h: {members: [a]}}", r"'a' is in two groups"),
        (MODELS + "groups: {g: {members: [a]}}\nmatrix: {sets: {s: a}}", r"both groups and matrix"),
        (MODELS + "groups: {g: {members: [a]}}\nrouting: {}", r"both routing and groups"),
        (MODELS + "matrix: {sets: {s: a &}}", r"matrix.sets.s = 'a &': a model is missing at the end"),
        (MODELS + "matrix: {sets: {s: (a | b}}", r"a parenthesis is not closed"),
        (MODELS + "matrix: {sets: {s: a b}}", r"'b' is one too many"),
        (MODELS + "matrix: {sets: {s: a ^ b}}", r"'\^' has no meaning"),
        (MODELS + "matrix: {sets: {s: '& a'}}", r"a model is missing before '&'"),
        (MODELS + "matrix: {sets: {s: +t}}", r"no set is called 't'"),
        (MODELS + "matrix: {sets: {s: +t, t: +s}}", r"refers to itself\s+s -> t -> s"),
    ],
)
def test_a_mistake_names_its_key_and_what_was_expected(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(text)


def test_all_mistakes_of_a_file_are_told_at_once() -> None:
    text = """
healthCheckTimeout: soon
models:
  a: {cmd: "", aliases: gpt-4, env: X, ttl: never}
  b: {cmd: "${llma}"}
  c: 5
"""
    with pytest.raises(SeveralErrors) as raised:
        read(text)
    said = str(raised.value)
    for key in (
        "models.a.cmd",
        "models.a.aliases",
        "models.a.env",
        "models.a.ttl",
        "models.b.cmd",
        "models.c",
    ):
        assert f"{key} " in said or f"{key}:" in said
    assert said.count("healthCheckTimeout") == 1


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
