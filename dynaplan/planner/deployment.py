"""The deployment that is planned for: its components, the check that it can be planned for, and the errors.

The errors have the names of Dynamo's planner::

    PlannerError
    |- DynamoGraphDeploymentNotFoundError      .name, .namespace
    |- ComponentError
    |  |- SubComponentNotFoundError            .sub_component_type
    |  |- DuplicateSubComponentError           .sub_component_type, .service_names
    |- ModelNameNotFoundError
    |- DeploymentModelNameMismatchError        .prefill_model_name, .decode_model_name
    |- UserProvidedModelNameMismatchError      .model_name, .user_provided_model_name
    |- DeploymentValidationError               .errors: all that a check has found
    |- EmptyTargetReplicasError

All are the user's: the deployment and the planner's options do not fit each other. Source: Dynamo 1.6.1, the
module ``planner_exceptions``; its errors about a backend framework have no place here, where nothing
depends on one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynaplan.contract.counts import FleetCounts
from dynaplan.contract.store_keys import SCALED_ROLES, DesiredCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.util.errors import UserError


@dataclass(frozen=True)
class ScaledComponent:
    """A component of one role; ``models`` are the names that its workers serve, empty when not known."""

    role: Role
    name: str
    models: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeployedComponents:
    """The components of a deployment; ``missing`` says why it is not ready, "" when it is."""

    components: tuple[ScaledComponent, ...] = ()
    missing: str = ""

    def of(self, role: Role) -> tuple[ScaledComponent, ...]:
        return tuple(each for each in self.components if each.role is role)


@dataclass(frozen=True)
class TargetReplica:
    """A number of workers that a role is to have."""

    sub_component_type: Role
    desired_replicas: int


def missing_workers(fleet: FleetCounts, desired: DesiredCounts) -> str:
    """Say what is missing: ready workers of a role, or any ready worker; "" when nothing is."""
    lines = []
    for role in SCALED_ROLES:
        counts = fleet.prefill if role is Role.PREFILL else fleet.decode
        ready, asked = counts.ready + counts.asleep, desired.of(role)
        wanted = asked if asked >= 0 else counts.present
        if ready < wanted:
            lines.append(f"{ready} of {wanted} {role.value} workers are ready")
    if not lines and not fleet.prefill.ready + fleet.decode.ready + fleet.decode.asleep:
        return "no worker is ready"
    return "; ".join(lines)


class PlannerError(UserError):
    """Base of the errors of this module."""


class DynamoGraphDeploymentNotFoundError(PlannerError):
    """The DynamoGraphDeployment that is to be scaled is not there."""

    def __init__(self, name: str, namespace: str) -> None:
        super().__init__(
            f"Parent DynamoGraphDeployment not found (name: {name!r} in namespace {namespace!r})",
            hint="DYN_PARENT_DGD_K8S_NAME names it, and POD_NAMESPACE where it is.",
        )
        self.name = name
        self.namespace = namespace


class ComponentError(PlannerError):
    """A component that is to be scaled is missing, or there is more than one."""


class SubComponentNotFoundError(ComponentError):
    """No component has that role, "prefill" or "decode"."""

    def __init__(self, sub_component_type: str, *, hint: str = "") -> None:
        super().__init__(f"the deployment has no {sub_component_type} component", hint=hint)
        self.sub_component_type = sub_component_type


class DuplicateSubComponentError(ComponentError):
    """Several components have one role; the planner scales one of each."""

    def __init__(self, sub_component_type: str, service_names: Sequence[str]) -> None:
        names = ", ".join(service_names)
        super().__init__(f"the deployment has several {sub_component_type} components: {names}")
        self.sub_component_type = sub_component_type
        self.service_names = tuple(service_names)


class ModelNameNotFoundError(PlannerError):
    """No component says which model it serves."""

    def __init__(self) -> None:
        super().__init__("no component says which model it serves", hint="Set served-model-name.")


class DeploymentModelNameMismatchError(PlannerError):
    """Prefill and decode components serve different models."""

    def __init__(self, prefill_model_name: str, decode_model_name: str) -> None:
        super().__init__(
            f"prefill workers serve {prefill_model_name!r}, decode workers {decode_model_name!r}",
            hint="A hand-off needs the same model on both sides.",
        )
        self.prefill_model_name = prefill_model_name
        self.decode_model_name = decode_model_name


class UserProvidedModelNameMismatchError(PlannerError):
    """The option ``served-model-name`` names another model than the components serve."""

    def __init__(self, model_name: str, user_provided_model_name: str) -> None:
        super().__init__(
            f"served-model-name is {user_provided_model_name!r}, and the deployment serves {model_name!r}"
        )
        self.model_name = model_name
        self.user_provided_model_name = user_provided_model_name


class DeploymentValidationError(PlannerError):
    """The deployment cannot be planned for; ``errors`` are the reasons."""

    def __init__(self, errors: Sequence[PlannerError]) -> None:
        hints = " ".join(dict.fromkeys(error.hint for error in errors if error.hint))
        super().__init__(f"Service verification failed: {'; '.join(map(_text, errors))}", hint=hints)
        self.errors = tuple(errors)


class EmptyTargetReplicasError(PlannerError):
    """Numbers of workers were to be set, and none was given."""

    def __init__(self) -> None:
        super().__init__("target_replicas cannot be empty")


def _text(error: PlannerError) -> str:
    return str(error.args[0])


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
    """Return the one component of a role, of several the one of that name; else raises a ComponentError."""
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
