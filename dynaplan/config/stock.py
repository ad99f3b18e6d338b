"""The keys that each stock service's section knows."""

from __future__ import annotations

from dynaplan.config.settings.engines import (
    VLLM_GONE,
    VLLM_OTHERS,
    LlamaCppOptions,
    OtherServerOptions,
    VllmOptions,
)
from dynaplan.config.settings.fields import Option, Options, options_of
from dynaplan.config.settings.frontend import FrontendSettings, ProcessorSettings, RouterSettings
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.config.settings.routing import ComponentSettings, DisaggregationSettings, RoutingSettings
from dynaplan.config.settings.worker import (
    CommandSettings,
    EngineOptions,
    ModelSettings,
    ProcessSettings,
    SimulationOptions,
    WorkerSettings,
)

FRONTEND = options_of(ModelSettings, FrontendSettings, DisaggregationSettings, ProcessSettings)
PROCESSOR = options_of(ModelSettings, RoutingSettings, DisaggregationSettings, ProcessorSettings)
ROUTER = options_of(ModelSettings, RoutingSettings, DisaggregationSettings, RouterSettings)
PLANNER = options_of(PlannerSettings)

_OTHERS: Options = {
    **{name: Option("An option of vLLM", name=name) for name in VLLM_OTHERS},
    **{
        name: Option("An option of vLLM of 2025", name=name, gone={"vllm": why})
        for name, why in VLLM_GONE.items()
    },
}

WORKER: Options = {
    **options_of(WorkerSettings, EngineOptions, SimulationOptions, VllmOptions, CommandSettings),
    **options_of(OtherServerOptions, LlamaCppOptions, RoutingSettings, DisaggregationSettings),
    **_OTHERS,
}
"""The keys of decode and of prefill workers: the original's services share one parser."""

OURS = frozenset(
    (
        *options_of(WorkerSettings, CommandSettings, SimulationOptions),
        *options_of(RoutingSettings, DisaggregationSettings, ComponentSettings),
        *(name for name, each in WORKER.items() if not each.is_flag),
        *("common-configs", "ServiceArgs"),
    )
)
"""Keys of a worker's section that no engine gets as a flag."""


def names_of(engine: str) -> dict[str, tuple[str, ...]]:
    """Options that this engine has under names of its own, and these."""
    return {name: each.names[engine] for name, each in WORKER.items() if engine in each.names}


def gone_from(engine: str) -> dict[str, str]:
    """Options that this engine does not take, and what came of each."""
    return {name: each.gone[engine] for name, each in WORKER.items() if engine in each.gone}


def agreed_with(engine: str) -> tuple[str, ...]:
    """Options that decode and prefill workers of this engine must have in common."""
    return tuple(name for name, each in WORKER.items() if engine in each.agreed)
