"""Finds the SLA planner's profile: a directory, a shipped profile, or Dynamo's name of a pre-swept one."""

from __future__ import annotations

from dynaplan.engines.sim.profiles import known_profiles, load_profile
from dynaplan.engines.timing_model.timing import MeasuredProfile
from dynaplan.util.errors import ConfigError

PRE_SWEPT = "use-pre-swept-results:"
"""The beginning of Dynamo's names of pre-swept profiles."""

_PARTS = "gpu_type:model:framework:framework_version:tp:dp:pp:block_size:max_batch_size:gpu_count"


def open_profile(profile_results_dir: str, tensor_parallel_size: int = 1) -> MeasuredProfile:
    """The profile that ``profile-results-dir`` names; raises ConfigError when there is none.

    A directory in one of the layouts of Dynamo's profiler, a JSON file, the name of a shipped profile, or
    ``use-pre-swept-results:`` and the ten values of a pre-swept configuration.
    """
    name = profile_results_dir
    if name.startswith(PRE_SWEPT):
        name, tensor_parallel_size = _pre_swept(name)
    try:
        return load_profile(name, tensor_parallel_size)
    except ConfigError as error:
        raise ConfigError(
            f"profile-results-dir is '{profile_results_dir}': {error.args[0]}",
            hint="The SLA planner needs the engine's profile. `dynaplan profile-sla` measures one of a "
            "running deployment, and writes the directory to name here; policy: load needs none. Shipped "
            f"profiles: {', '.join(known_profiles())}.",
        ) from error


def _pre_swept(name: str) -> tuple[str, int]:
    """The shipped profile's name, and its tensor parallel size."""
    parts = name.removeprefix(PRE_SWEPT).split(":")
    if len(parts) != len(_PARTS.split(":")) or not parts[4].isdecimal():
        raise ConfigError(f"profile-results-dir is '{name}'", hint=f"Expected {PRE_SWEPT}{_PARTS}.")
    return f"{parts[0]}-{parts[1].rpartition('/')[2]}", int(parts[4])
