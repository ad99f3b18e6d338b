"""The models of one deployment as its configuration has them; made anew when that is loaded anew."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from dynaplan.config.settings.models import OnDemandSettings, ServedModel
from dynaplan.models.model import ModelPolicies, ModelPolicy
from dynaplan.models.rules.replicas import prefill_pool_name


@dataclass(frozen=True)
class WorkerPool:
    """The decode workers of a model, which have its name, or its prefill workers: of one component."""

    name: str
    component: str
    model: str
    settings: OnDemandSettings
    is_prefill: bool = False


def pools_of(model: ServedModel) -> tuple[WorkerPool, ...]:
    """Return the pools of a model, the decode workers first."""
    decode = WorkerPool(model.name, model.component, model.name, model.settings)
    if (own := model.prefill) is None:
        return (decode,)
    name = prefill_pool_name(model.name)
    return decode, WorkerPool(name, own.component, model.name, own.settings, is_prefill=True)


@dataclass(frozen=True)
class DeployedModels:
    """The models, and their policies.

    ``planned`` are those with a planner of their own, ``by_driver`` the components whose workers take what
    they need, whatever they were given. Of each device ``budget_bytes`` are for models; 0 is all of it.
    """

    models: tuple[ServedModel, ...] = ()
    policies: ModelPolicies = field(default_factory=lambda: ModelPolicies({}))
    planned: frozenset[str] = frozenset()
    by_driver: frozenset[str] = frozenset()
    budget_bytes: int = 0

    @cached_property
    def pools(self) -> tuple[WorkerPool, ...]:
        return tuple(pool for each in self.models for pool in pools_of(each))

    @cached_property
    def components(self) -> dict[str, str]:
        """The component of each pool of workers, by the pool's name: the first of a model has its name."""
        return {each.name: each.component for each in self.pools}

    @cached_property
    def has_host(self) -> bool:
        """Whether the host's memory counts: models are in it, or sleep there."""
        return any(
            each.devices == 0 or each.sleep_levels or (each.prefill and each.prefill.devices == 0)
            for each in self.policies.models.values()
        )

    def policy(self, pool: WorkerPool) -> ModelPolicy:
        own = self.policies.models[pool.model]
        return own.prefill if pool.is_prefill and own.prefill else own
