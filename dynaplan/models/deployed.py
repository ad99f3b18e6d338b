"""The models of one deployment as its configuration has them; made anew when that is loaded anew."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from dynaplan.config.settings.models import ServedModel, WorkerPool
from dynaplan.models.model import ModelPolicies, ModelPolicy


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
        return tuple(pool for each in self.models for pool in each.pools)

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
