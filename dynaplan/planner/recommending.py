"""Recommendations by a recording, once a day, beside a planner that runs.

A deployment with ``record-traffic`` has the last day's requests, and ``dynaplan simulate`` can tell how other
policies would have answered them. Nothing is changed by it: the planner's log and ``status`` say it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from dynaplan.domain.errors import TemporaryError
from dynaplan.domain.masking import mask_secrets
from dynaplan.domain.settings.planner import PlannerSettings
from dynaplan.domain.settings.worker import engine_of
from dynaplan.options.service_config import kebab_keys, section_options
from dynaplan.ports.box import Clock
from dynaplan.ports.planning import RecommendsByRecording

log = logging.getLogger(__name__)

FIRST_AFTER_S = 3600.0
"""Seconds of a planner's life before the first recommendation: less traffic says little."""

DAY_S = 86400.0
"""Seconds at the end of a recording that are simulated: a day has all of its hours."""


def recording_of(config: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the file that the graph's frontends record their traffic in; empty where they do not."""
    return str(section_options(config, "Frontend").get("record-traffic") or "")


def profile(settings: PlannerSettings, config: Mapping[str, Mapping[str, Any]]) -> list[str] | None:
    """Return the option that names the engine's profile, empty where its section does; None without one.

    Only the simulated engine has a profile by default.
    """
    decode = section_options(config, settings.decode_component)
    if engine_of(decode) == "sim":
        return []
    if kebab_keys(config.get("Planner") or {}).get("profile-results-dir"):
        return ["--profile", settings.profile_results_dir]
    return None


async def recommend_daily(
    settings: PlannerSettings,
    config: Mapping[str, Mapping[str, Any]],
    recommender: RecommendsByRecording,
    clock: Clock,
) -> None:
    """Recommend by the graph's recording every ``recommend-every``, for ever.

    Returns where that is 0, or where nothing times the engine.
    """
    recording, every_s = recording_of(config), settings.recommend_every_s
    if not every_s:
        return
    if (given := profile(settings, config)) is None:
        log.info("nothing is recommended by %s: no profile-results-dir times this engine", recording)
        return
    await clock.sleep(min(FIRST_AFTER_S, every_s))
    while True:
        age_s = recommender.age_s()
        if age_s is None or age_s >= every_s:
            await _recommend(config, recommender, recording, [*arguments(settings, recording), *given])
            age_s = 0.0
        await clock.sleep(every_s - age_s)


async def _recommend(
    config: Mapping[str, Mapping[str, Any]],
    recommender: RecommendsByRecording,
    recording: str,
    arguments: Sequence[str],
) -> None:
    try:
        words = await recommender.recommend(json.dumps(mask_secrets(config)), arguments)
    except (TemporaryError, OSError) as error:
        log.warning("nothing could be recommended by %s: %s", recording, error)
        return
    log.info("recommended by the last day of %s: %s", recording, words)


def arguments(settings: PlannerSettings, recording: str) -> list[str]:
    """Return the options of the simulation that are not in the graph's configuration."""
    startup = [] if settings.startup_time_s is None else ["--startup-time", f"{settings.startup_time_s:g}"]
    return ["--trace", recording, "--last", f"{DAY_S:g}", "--gpus", str(settings.max_gpu_budget), *startup]
