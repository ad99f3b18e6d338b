"""The inputs of a planner that plans for targets: profile, forecaster, warm-up trace, source of traffic.

``serve`` checks them before it starts anything.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from dynaplan.config import certificates
from dynaplan.planner.forecasting.library_forecaster import make_forecaster
from dynaplan.planner.forecasting.traffic_history import IntervalLoad, interval_history
from dynaplan.planner.metrics.exposition import metrics_prefix
from dynaplan.planner.metrics.frontends import FrontendsTraffic
from dynaplan.planner.metrics.prometheus import PrometheusTraffic
from dynaplan.planner.observer import TrafficObserver
from dynaplan.planner.own_policy import load_own_policy
from dynaplan.planner.sla_model import build_sla_model
from dynaplan.simulation.traces.reading import read_requests
from dynaplan.store.instances import public_urls

if TYPE_CHECKING:
    from dynaplan.config.settings.planner import PlannerSettings
    from dynaplan.planner.ports import TrafficSource
    from dynaplan.store.discovery import Discovery
    from dynaplan.util.clock import Clock

log = logging.getLogger(__name__)


def check_sources(settings: PlannerSettings) -> None:
    """Raise ConfigError when a planner that sees traffic lacks its policy, profile, trace or library.

    Of a Prometheus server only the address is checked.
    """
    load_own_policy(settings)
    if settings.prometheus_endpoint:
        _prometheus(settings)
    if settings.is_by_targets:
        build_sla_model(settings)
    make_forecaster(settings, settings.adjustment_interval_s)
    _warm_up(settings)


def traffic_observer(
    settings: PlannerSettings, discovery: Discovery, clock: Clock, *, is_one_of_several: bool = False
) -> TrafficObserver:
    """Return the observer of the traffic: of a Prometheus server, where one is named, else of frontends.

    ``is_one_of_several``: of the models that the frontends serve, the settings are about one.
    """
    interval_s, before = settings.adjustment_interval_s, _warm_up(settings)
    if settings.prometheus_endpoint:
        source: TrafficSource = _prometheus(settings, is_one_of_several=is_one_of_several)
    else:
        source = FrontendsTraffic(
            lambda: public_urls(discovery.all()),
            settings.namespace,
            clock,
            model=settings.served_model_name or "",
            is_one_of_several=is_one_of_several,
            prefix=metrics_prefix(),
            tls=certificates.authorities(os.environ),
        )
    return TrafficObserver(settings, source, make_forecaster(settings, interval_s), clock, before)


def _prometheus(settings: PlannerSettings, *, is_one_of_several: bool = False) -> TrafficSource:
    """Return the traffic as a Prometheus server has it; raises ConfigError for an invalid address."""
    model = settings.served_model_name or ""
    return PrometheusTraffic(
        settings.prometheus_endpoint or "",
        settings.namespace,
        model=model,
        is_one_of_several=is_one_of_several,
        prefix=metrics_prefix(),
    )


def _warm_up(settings: PlannerSettings) -> list[IntervalLoad]:
    trace = settings.load_predictor_warmup_trace
    if not trace:
        return []
    before = interval_history(read_requests(trace, 1.0, 1), settings.adjustment_interval_s)
    log.info("the history begins with %d intervals of %s", len(before), trace)
    return before
