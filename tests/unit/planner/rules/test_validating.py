"""A deployment can be planned for when its components are there, once each, and serve one model."""

from __future__ import annotations

import pytest

from dynaplan.graph.lifecycle import Role
from dynaplan.planner.deployment import (
    DeployedComponents,
    DeploymentModelNameMismatchError,
    DeploymentValidationError,
    DuplicateSubComponentError,
    ModelNameNotFoundError,
    PlannerError,
    ScaledComponent,
    SubComponentNotFoundError,
    UserProvidedModelNameMismatchError,
    check_deployment,
)

PREFILL = ScaledComponent(Role.PREFILL, "prefill", ("tiny",))
DECODE = ScaledComponent(Role.DECODE, "decode", ("tiny",))
BOTH: dict[Role, str | None] = {Role.PREFILL: None, Role.DECODE: None}


def errors_of(
    *components: ScaledComponent,
    names: dict[Role, str | None] = BOTH,
    model_name: str | None = None,
) -> list[type[PlannerError]]:
    with pytest.raises(DeploymentValidationError, match="Service verification failed: ") as raised:
        check_deployment(DeployedComponents(components), names, model_name)
    return [type(each) for each in raised.value.errors]


@pytest.mark.parametrize("model_name", [None, "tiny"])
def test_one_component_of_each_role_with_one_model_does_not_raise(model_name: str | None) -> None:
    check_deployment(DeployedComponents((PREFILL, DECODE)), BOTH, model_name)


def test_a_role_that_is_not_needed_does_not_raise_when_it_is_missing() -> None:
    check_deployment(DeployedComponents((DECODE,)), {Role.DECODE: None})
    check_deployment(DeployedComponents((PREFILL,)), {Role.PREFILL: None})


def test_a_missing_role_is_named() -> None:
    assert errors_of(DECODE) == [SubComponentNotFoundError]
    assert errors_of(model_name="m") == [SubComponentNotFoundError, SubComponentNotFoundError]


def test_of_several_components_of_a_role_the_named_one_is_taken() -> None:
    other = ScaledComponent(Role.DECODE, "other", ("another",))
    check_deployment(DeployedComponents((DECODE, other)), {Role.DECODE: "decode"})
    assert errors_of(DECODE, other, names={Role.DECODE: None}, model_name="tiny") == [
        DuplicateSubComponentError
    ]
    assert DuplicateSubComponentError in errors_of(DECODE, other, names={Role.DECODE: "third"})


def test_model_names_agree_with_each_other_and_with_the_users() -> None:
    another = ScaledComponent(Role.DECODE, "decode", ("another",))
    assert errors_of(PREFILL, another) == [DeploymentModelNameMismatchError]
    assert errors_of(PREFILL, DECODE, model_name="mine") == [UserProvidedModelNameMismatchError]


def test_a_model_has_to_be_named_by_somebody() -> None:
    silent = ScaledComponent(Role.DECODE, "decode")
    assert errors_of(silent, names={Role.DECODE: None}) == [ModelNameNotFoundError]
    check_deployment(DeployedComponents((silent,)), {Role.DECODE: None}, "mine")
