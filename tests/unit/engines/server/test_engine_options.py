from __future__ import annotations

import pytest

from dynaplan.config.parallelism import gpus_needed, tensor_parallel_size
from dynaplan.config.settings.fields import options_of
from dynaplan.config.settings.frontend import RoutingSettings
from dynaplan.config.settings.worker import CommandSettings, SimulationOptions, WorkerSettings
from dynaplan.config.stock import OWN_OPTIONS
from dynaplan.engines.server.engine_options import (
    FlagStyle,
    engine_flags,
    flag_style,
    memory_fraction,
    removed_options,
)
from dynaplan.util.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (7, ("--key", "7")),
        (0.5, ("--key", "0.5")),
        ("text with spaces", ("--key", "text with spaces")),
        (True, ("--key",)),
        (False, ()),
        (None, ()),
        ([], ()),
        (["a", 2], ("--key", "a", "2")),
        ({"a": {"b": [1]}}, ("--key", '{"a":{"b":[1]}}')),
        ([{"a": 1}], ("--key", '{"a":1}')),
        ('{"a": 1}', ("--key", '{"a": 1}')),
    ],
)
def test_a_value_becomes_the_words_of_a_flag(value: object, words: tuple[str, ...]) -> None:
    assert engine_flags({"key": value}, FlagStyle()) == words


def test_false_is_said_only_where_the_engine_knows_how() -> None:
    style = FlagStyle(negatable=frozenset({"enable-prefix-caching"}))
    options = {"enable-prefix-caching": False, "enforce-eager": False}
    assert engine_flags(options, style) == ("--no-enable-prefix-caching",)


def test_names_follow_the_engine() -> None:
    style = FlagStyle(renamed={"max-model-len": "max-seq-len"}, separator="_")
    assert engine_flags({"max-model-len": 5, "new-one": True}, style) == ("--max_seq_len", "5", "--new_one")


def test_what_is_ours_or_handled_or_gone_is_not_passed_on() -> None:
    style = FlagStyle(handled=frozenset({"model"}), removed={"swap-space": "it has it no more"})
    options = {**dict.fromkeys(OWN_OPTIONS, 1), "model": "m", "swap-space": 4, "dtype": "half"}
    assert engine_flags(options, style) == ("--dtype", "half")


def test_a_gone_option_is_told_only_when_it_asks_for_something() -> None:
    style = FlagStyle(removed={"swap-space": "gone", "use-v2": "gone", "task": "gone"})
    assert removed_options({"swap-space": 4, "use-v2": False, "task": None}, style) == {"swap-space": "gone"}


@pytest.mark.parametrize(
    ("options", "gpus", "size"),
    [
        ({}, 0, 1),
        ({}, 1, 1),
        ({}, 0.4, 1),
        ({}, 4, 4),
        ({"tp-size": 4}, 4, 4),
        ({"tensor-parallel-size": 2}, 0, 2),
        ({"pipeline-parallel-size": 2}, 4, 2),
        ({"tensor-parallel-size": 2, "pipeline-parallel-size": 2}, 4, 2),
        ({"tensor-parallel-size": None}, 2, 2),
        ({"pp-size": 2}, 4, 2),
        ({"data-parallel-size": 2}, 2, 1),
        ({"tensor-parallel-size": 1, "dp-size": 2}, 2, 1),
        ({"tp-size": 2, "pp-size": 2, "data-parallel-size": 2}, 8, 2),
        ({"tp-size": 4, "dp-size": 2, "enable-dp-attention": True}, 4, 4),
    ],
)
def test_layers_are_split_over_the_gpus_of_the_worker(
    options: dict[str, object], gpus: float, size: int
) -> None:
    assert tensor_parallel_size(options, gpus) == size


@pytest.mark.parametrize(
    ("options", "gpus", "said"),
    [
        ({"tensor-parallel-size": 2}, 1, "tensor-parallel-size 2"),
        ({"tp-size": 2}, 4, "tp-size 2"),
        ({"tp-size": 2}, 0.5, "resources.gpu is 0.5"),
        ({"pipeline-parallel-size": 3}, 4, "pipeline-parallel-size 3"),
        ({"tensor-parallel-size": 4, "pipeline-parallel-size": 2}, 4, "needs 8 GPUs"),
        ({"tp-size": 2, "pp-size": 2}, 2, "tp-size 2 times pp-size 2 needs 4 GPUs"),
        ({"data-parallel-size": 2}, 1, "data-parallel-size 2"),
        ({"data-parallel-size": 2}, 0.5, "data-parallel-size 2"),
        ({"tp-size": 2, "tensor-parallel-size": 4}, 4, "tensor-parallel-size is 4 and tp-size is 2"),
        ({"tensor-parallel-size": "two"}, 2, "'two'"),
        ({"tensor-parallel-size": True}, 1, "True"),
    ],
)
def test_gpus_that_contradict_the_options_are_a_config_error(
    options: dict[str, object], gpus: float, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        tensor_parallel_size(options, gpus)


def test_a_part_of_a_gpu_gives_that_part_of_its_memory() -> None:
    assert memory_fraction(0.4, 0.9) == 0.36
    assert memory_fraction(1, 0.9) is None
    assert memory_fraction(0, 0.9) is None


@pytest.mark.parametrize(
    ("options", "usual", "gpus"),
    [
        ({}, 0.5, 0.5),
        ({"tp-size": 1}, 1, 1),
        ({"tp-size": 2, "pp-size": 2}, 1, 4),
        ({"data-parallel-size": 2}, 1, 2),
        ({"pipeline-parallel-size": 2}, 4, 4),
        ({"tp-size": 2}, 4, 2),
    ],
)
def test_a_worker_that_does_not_say_gets_as_many_gpus_as_its_sizes_need(
    options: dict[str, object], usual: float, gpus: float
) -> None:
    assert gpus_needed(options, usual) == gpus


def test_what_dynaplan_reads_itself_is_no_flag_of_an_engine() -> None:
    assert set(options_of(WorkerSettings, CommandSettings, RoutingSettings, SimulationOptions)) <= OWN_OPTIONS
    assert "hf-token" in OWN_OPTIONS


def test_a_known_engine_has_its_own_names_but_for_what_its_adapter_handles() -> None:
    style = flag_style("sglang", handled=("max-num-batched-tokens",))
    assert style.renamed["max-num-seqs"] == "max-running-requests"
    assert not {"max-num-batched-tokens", "kv-total-tokens"} & set(style.renamed)
    assert set(style.removed) == {"kv-transfer-config", "num-gpu-blocks-override", "swap-space"}
