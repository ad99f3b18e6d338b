"""The errors of a planner carry what they are about, and Dynamo's words where programs look for them."""

from __future__ import annotations

from dynaplan.planner.deployment import (
    ComponentError,
    DeploymentModelNameMismatchError,
    DeploymentValidationError,
    DuplicateSubComponentError,
    DynamoGraphDeploymentNotFoundError,
    EmptyTargetReplicasError,
    ModelNameNotFoundError,
    PlannerError,
    SubComponentNotFoundError,
    UserProvidedModelNameMismatchError,
)
from dynaplan.util.errors import UserError


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
