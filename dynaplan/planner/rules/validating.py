"""Checks that a deployment can be planned for: its components are there, and serve one model."""

from __future__ import annotations

from collections.abc import Mapping

from dynaplan.graph.lifecycle import Role
from dynaplan.planner.model.components import DeployedComponents, ScaledComponent
from dynaplan.planner.model.errors import (
    DeploymentModelNameMismatchError,
    DeploymentValidationError,
    DuplicateSubComponentError,
    ModelNameNotFoundError,
    PlannerError,
    SubComponentNotFoundError,
    UserProvidedModelNameMismatchError,
)


def check_deployment(
    deployed: DeployedComponents, names: Mapping[Role, str | None], model_name: str | None = None
) -> None:
    """Raise DeploymentValidationError with all that is wrong.

    ``names`` has the roles that are needed, each with the name of its component where several have that role.
    ``model_name`` is the model that the user says is served; without it the components have to tell one.
    """
    errors: list[PlannerError] = []
    models: dict[Role, str] = {}
    for role, name in names.items():
        try:
            found = _only(deployed, role, name)
            models |= {role: found.models[0]} if found.models else {}
        except PlannerError as error:
            errors.append(error)
    errors += _errors_of_models(models, model_name)
    if errors:
        raise DeploymentValidationError(errors)


def _only(deployed: DeployedComponents, role: Role, name: str | None) -> ScaledComponent:
    """Return the one component of a role; raises a ComponentError."""
    found = deployed.of(role)
    if len(found) > 1:
        found = tuple(each for each in found if each.name == name) or found
    if len(found) > 1:
        raise DuplicateSubComponentError(role.value, [each.name for each in found])
    if not found:
        raise SubComponentNotFoundError(role.value)
    return found[0]


def _errors_of_models(models: Mapping[Role, str], model_name: str | None) -> list[PlannerError]:
    prefill, decode = models.get(Role.PREFILL), models.get(Role.DECODE)
    if prefill and decode and prefill != decode:
        return [DeploymentModelNameMismatchError(prefill, decode)]
    served = decode or prefill
    if model_name and served and served != model_name:
        return [UserProvidedModelNameMismatchError(served, model_name)]
    return [] if served or model_name else [ModelNameNotFoundError()]
