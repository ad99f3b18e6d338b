"""Which models of a box can be loaded at once."""

from __future__ import annotations

import random

import pytest

from dynaplan.models.model import HOST, Constraints, Device
from dynaplan.models.rules.fit import ModelFit, fit_models
from dynaplan.models.rules.memory import Need
from dynaplan.util.amounts import GIB

GPU = Device(0, 24 * GIB)


def needs(**gigabytes: float) -> list[Need]:
    return [Need(name, int(size * GIB)) for name, size in gigabytes.items()]


def test_models_that_all_fit_are_one_set() -> None:
    assert fit_models(needs(ant=10, bee=8, cow=6), [GPU]) == ModelFit((("ant", "bee", "cow"),), ())


def test_what_does_not_fit_alone_never_does_and_keeps_no_other_from_fitting() -> None:
    assert fit_models(needs(ant=10, bee=25, cow=6), [GPU]) == ModelFit((("ant", "cow"),), ("bee",))


def test_a_model_that_leaves_no_room_for_another_is_a_set_of_its_own() -> None:
    assert fit_models(needs(ant=20, bee=10, cow=6), [GPU]).together == (("ant",), ("bee", "cow"))


def test_a_model_may_be_in_several_sets_and_no_set_is_a_part_of_another() -> None:
    found = fit_models(needs(ant=14, bee=12, cow=6), [GPU])
    assert found.together == (("ant", "cow"), ("bee", "cow"))


def test_models_are_spread_over_devices_of_their_kind() -> None:
    devices = [GPU, Device(1, 24 * GIB), Device(HOST, 8 * GIB)]
    of_both = Need("wide", 10 * GIB, devices=2)
    on_host = Need("host", 8 * GIB, devices=0)
    found = fit_models([*needs(ant=14, bee=14), of_both, on_host], devices)
    assert found == ModelFit((("ant", "bee", "wide", "host"),), ())
    assert fit_models([Need("wide", 10 * GIB, devices=2)], [GPU]).never == ("wide",)


def test_what_others_hold_of_a_device_is_no_room() -> None:
    assert fit_models(needs(ant=10), [Device(0, 24 * GIB, foreign_bytes=15 * GIB)]).never == ("ant",)


@pytest.mark.parametrize(
    "constraints",
    [
        Constraints(leaves={"bee": frozenset({"ant"})}),
        Constraints(together=(frozenset({"ant", "cow"}), frozenset({"bee", "cow"}))),
    ],
)
def test_models_that_their_owner_keeps_apart_are_in_no_set_together(constraints: Constraints) -> None:
    found = fit_models(needs(ant=1, bee=1, cow=1), [GPU], constraints)
    assert found.together == (("ant", "cow"), ("bee", "cow"))


def test_an_exclusive_model_is_alone_on_its_gpu() -> None:
    alone = Need("alone", GIB, is_exclusive=True)
    assert fit_models([alone, *needs(ant=1)], [GPU]).together == (("alone",), ("ant",))
    assert fit_models([alone, *needs(ant=1)], [GPU, Device(1, 24 * GIB)]).together == (("alone", "ant"),)


@pytest.mark.parametrize("seed", range(20))
def test_no_device_of_a_set_holds_more_than_it_has(seed: int) -> None:
    draw = random.Random(seed)
    sizes = needs(**{f"m{index}": draw.uniform(1, 30) for index in range(12)})
    found = fit_models(sizes, [GPU])
    by_name = {each.model: each.bytes_each for each in sizes}
    assert all(sum(by_name[name] for name in names) <= GPU.total_bytes for names in found.together)
    assert {*found.never, *(name for names in found.together for name in names)} == set(by_name)
