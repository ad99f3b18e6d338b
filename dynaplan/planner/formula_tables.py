"""Tables for ``sizing: formula``: a profile's scattered points, interpolated as Dynamo's planner does it.

Source: Dynamo 0.7 to 1.2, which uses scipy's ``interp1d(kind="cubic")`` for prefill, ``griddata`` for decode.
The library is imported here only, when the first table is made: it costs a second and 60 MiB.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from dynaplan.engines.timing_model.timing import MeasuredProfile
from dynaplan.planner.sizing.formula import DecodeTable, Piece, PrefillTable, ProfileTables
from dynaplan.util.errors import ConfigError

RESOLUTION = 100
"""The number of grid points in either direction of the decode table, as in the original."""


def fit_tables(profile: MeasuredProfile, name: str) -> ProfileTables:
    """The tables of a profile; takes some 50 ms, and a second more for the first one in a process.

    Raises ConfigError when scipy is not installed, or, naming the profile, when its points are too few for
    cubic interpolation.
    """
    if find_spec("scipy") is None:
        raise ConfigError(
            "sizing is 'formula', but the Python module scipy is not installed",
            hint="Run: pip install scipy. Or choose sizing: queueing, which needs no library.",
        )
    return ProfileTables(_prefill_table(profile, name), _decode_table(profile, name))


def _prefill_table(profile: MeasuredProfile, name: str) -> PrefillTable:
    """Fit cubic splines; the two outer pieces at either end are one cubic ("not-a-knot")."""
    from scipy.interpolate import CubicSpline

    points = sorted(zip(profile.prefill_isl, profile.prefill_ttft, profile.prefill_thpt_per_gpu, strict=True))
    isl_tokens, ttft_ms, tokens_per_s = (list(each) for each in zip(*points, strict=True))
    if len(set(isl_tokens)) < max(4, len(isl_tokens)):
        raise ConfigError(
            f"profile '{name}' has prefill points at the prompt lengths {isl_tokens}",
            hint="Expected at least 4, all different.",
        )
    return PrefillTable(
        tuple(isl_tokens),
        _pieces(CubicSpline(isl_tokens, ttft_ms, bc_type="not-a-knot")),
        _pieces(CubicSpline(isl_tokens, tokens_per_s, bc_type="not-a-knot")),
    )


def _pieces(spline: Any) -> tuple[Piece, ...]:
    return tuple(tuple(each) for each in spline.c.T.tolist())


def _decode_table(profile: MeasuredProfile, name: str) -> DecodeTable:
    """Interpolate by Clough-Tocher over the triangulated points; outside of them, take the nearest one."""
    import numpy
    from scipy.interpolate import CloughTocher2DInterpolator, NearestNDInterpolator
    from scipy.spatial import QhullError

    longest_tokens = max(profile.y_context_length)
    grid = numpy.meshgrid(numpy.linspace(0, 1, RESOLUTION), numpy.linspace(0, longest_tokens, RESOLUTION))
    points = numpy.column_stack((profile.x_kv_usage, profile.y_context_length))
    values = numpy.column_stack((profile.z_itl, profile.z_thpt_per_gpu))
    try:
        inside = CloughTocher2DInterpolator(points, values)(*grid)
    except (QhullError, ValueError) as error:
        raise ConfigError(
            f"profile '{name}' has decode points that span no area",
            hint="Expected several KV usages at each of at least two contexts.",
        ) from error
    filled = numpy.where(numpy.isnan(inside), NearestNDInterpolator(points, values)(*grid), inside)
    itl_ms, tokens_per_s = (tuple(map(tuple, filled[:, :, column].tolist())) for column in (0, 1))
    return DecodeTable(longest_tokens, profile.max_kv_tokens, itl_ms, tokens_per_s)
