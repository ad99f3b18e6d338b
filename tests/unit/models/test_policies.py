"""What the rules of many models are told of one: its GPUs, and the memory on each."""

from __future__ import annotations

from typing import Any

from dynaplan.config.settings.models import OnDemandSettings
from dynaplan.contract.gpus import Gpu
from dynaplan.models.model import Device, ModelPolicy, ModelStatus
from dynaplan.models.policies import model_policy
from dynaplan.models.rules.eviction import choose
from dynaplan.models.rules.memory import need, promise

GIB = 2**30
BOX = [Gpu(0, "GPU-a", memory_bytes=24 * GIB), Gpu(1, "GPU-b", memory_bytes=24 * GIB)]


def policy(memory_gb: float = 0, envs: dict[str, str] | None = None, **options: Any) -> ModelPolicy:
    own = OnDemandSettings(memory_bytes=int(memory_gb * GIB) or None)
    return model_policy(
        own, {key.replace("_", "-"): each for key, each in options.items()}, 1, BOX, envs or {}
    )


def test_the_owners_words_give_number_and_devices_and_are_kept_for_why() -> None:
    found = policy(engine="command", command="gpu-server", envs={"CUDA_VISIBLE_DEVICES": "1"})
    assert (found.devices, found.allowed_devices) == (1, {1})
    assert found.chosen_by == "CUDA_VISIBLE_DEVICES=1"


def test_options_of_a_recognised_engine_are_words_as_well() -> None:
    assert policy(engine="llamacpp", model="a.gguf", tensor_split="3,1").devices == 2
    assert policy(engine="llamacpp", model="a.gguf", n_gpu_layers=0).devices == 0
    assert policy(engine="llamacpp", model="a.gguf", device="CUDA1").allowed_devices == {1}


def test_a_llama_cpp_model_has_as_many_gpus_as_it_needs_and_equal_parts_on_each() -> None:
    small, large = (policy(memory_gb=size, engine="llamacpp", model="a.gguf") for size in (24, 30))
    assert (small.devices, small.claim_bytes) == (1, 24 * GIB)
    assert (large.devices, large.claim_bytes) == (2, 15 * GIB)
    never = policy(memory_gb=200, engine="llamacpp", model="a.gguf")
    assert (never.devices, never.claim_bytes) == (2, 100 * GIB)


def test_on_unequal_gpus_each_has_its_part_by_its_memory() -> None:
    unequal = [Gpu(0, "GPU-a", memory_bytes=12 * GIB), Gpu(1, "GPU-b", memory_bytes=24 * GIB)]

    def on_unequal(memory_gb: int) -> ModelPolicy:
        own = OnDemandSettings(memory_bytes=memory_gb * GIB)
        return model_policy(own, {"engine": "llamacpp", "model": "a.gguf"}, 1, unequal)

    small, large = on_unequal(10), on_unequal(30)
    assert (small.devices, small.allowed_devices, small.parts) == (1, frozenset(), {})
    assert (large.devices, large.claim_bytes, large.allowed_devices) == (2, 20 * GIB, {0, 1})
    wanted = need(large, ModelStatus("a"), [])
    assert [wanted.bytes_on(index) for index in (0, 1)] == [10 * GIB, 20 * GIB]
    devices = [Device(gpu.index, gpu.memory_bytes) for gpu in unequal]
    choice = choose(wanted, devices, {}, ())
    assert choice is not None
    assert promise(wanted, choice.devices).bytes == {0: 10 * GIB, 1: 20 * GIB}


def test_another_engine_is_not_spread_over_gpus_that_it_was_not_told_of() -> None:
    assert policy(memory_gb=30, engine="command", command="server").devices == 1
