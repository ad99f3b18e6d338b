"""Workers are missing while fewer are ready than are asked for.

The errors of a planner carry what they are about, and Dynamo's words where programs look for them.

A deployment can be planned for when its components are there, once each, and serve one model.
"""

from __future__ import annotations

import pytest

from dynaplan.contract.counts import FleetCounts, WorkerCounts
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.deployment import (
    ComponentError,
    DeployedComponents,
    DeploymentModelNameMismatchError,
    DeploymentValidationError,
    DuplicateSubComponentError,
    DynamoGraphDeploymentNotFoundError,
    EmptyTargetReplicasError,
    ModelNameNotFoundError,
    PlannerError,
    ScaledComponent,
    SubComponentNotFoundError,
    UserProvidedModelNameMismatchError,
    check_deployment,
    missing_workers,
)
from dynaplan.util.errors import UserError


def test_components_are_found_by_role() -> None:
    decode = ScaledComponent(Role.DECODE, "d")
    deployed = DeployedComponents((ScaledComponent(Role.PREFILL, "p"), decode))
    assert deployed.of(Role.DECODE) == (decode,)


@pytest.mark.parametrize(
    ("prefill", "decode", "desired", "expected"),
    [
        (WorkerCounts(ready=1), WorkerCounts(ready=2), DesiredCounts(1, 2), ""),
        (WorkerCounts(), WorkerCounts(asleep=1), DesiredCounts(), ""),
        (WorkerCounts(), WorkerCounts(ready=2, draining=1), DesiredCounts(-1, 1), ""),
        (WorkerCounts(), WorkerCounts(), DesiredCounts(), "no worker is ready"),
        (
            WorkerCounts(ready=1),
            WorkerCounts(ready=1, starting=1),
            DesiredCounts(2, 2),
            "1 of 2 prefill workers are ready; 1 of 2 decode workers are ready",
        ),
        (
            WorkerCounts(),
            WorkerCounts(ready=1, starting=1),
            DesiredCounts(),
            "1 of 2 decode workers are ready",
        ),
    ],
)
def test_a_role_with_fewer_ready_workers_than_asked_for_is_missing_some(
    prefill: WorkerCounts, decode: WorkerCounts, desired: DesiredCounts, expected: str
) -> None:
    assert missing_workers(FleetCounts(prefill, decode), desired) == expected


def test_the_words_are_dynamos() -> None:
    assert str(EmptyTargetReplicasError()) == "target_replicas cannot be empty"
    missing = DynamoGraphDeploymentNotFoundError("my-dgd", "default")
    assert missing.args[0] == "Parent DynamoGraphDeployment not found (name: 'my-dgd' in namespace 'default')"
    errors = [SubComponentNotFoundError("prefill"), ModelNameNotFoundError()]
    whole = DeploymentValidationError(errors)
    assert whole.args[0].startswith("Service verification failed: ")
    assert whole.args[0].count("; ") == 1
    assert (whole.errors, whole.hint) == (tuple(errors), "Set served-model-name.")


def test_every_error_is_the_users_and_says_what_it_is_about() -> None:
    mismatch = DeploymentModelNameMismatchError("a", "b")
    other = UserProvidedModelNameMismatchError("a", "mine")
    twice = DuplicateSubComponentError("decode", ["x", "y"])
    missing = SubComponentNotFoundError("prefill")
    assert (mismatch.prefill_model_name, mismatch.decode_model_name) == ("a", "b")
    assert (other.model_name, other.user_provided_model_name) == ("a", "mine")
    assert (twice.sub_component_type, twice.service_names) == ("decode", ("x", "y"))
    assert missing.sub_component_type == "prefill"
    assert issubclass(PlannerError, UserError)
    assert {type(twice).__mro__[1], type(missing).__mro__[1]} == {ComponentError}


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
