"""A worker's metrics in Prometheus' text format, rendered by hand: the library would cost start-up time."""

from __future__ import annotations

from collections.abc import Mapping

from dynaplan.util.metric_help import help_of

CONTENT_TYPE = "text/plain; version=0.0.4"

PREFIX = "dynamo_component_"

_SUMMARY = ("_sum", "_count")
_SUMMARY_MARK = " summary"


def render(values: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """One sample per name, all with the same labels, under its help text and type.

    A name that ends in ``_total`` is a counter. Samples of an engine's histogram, ``_sum`` and ``_count``,
    are a summary without quantiles.
    """
    written = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    families: dict[str, list[str]] = {}
    for name, value in values.items():
        families.setdefault(_family(name), []).append(f"{name}{{{written}}} {value:.17g}\n")
    return "".join(f"{_head(name)}{''.join(samples)}" for name, samples in families.items())


def _family(sample: str) -> str:
    for suffix in _SUMMARY:
        if sample.endswith(suffix):
            return sample.removesuffix(suffix) + _SUMMARY_MARK
    return sample


def _head(family: str) -> str:
    name = family.removesuffix(_SUMMARY_MARK)
    kind = "summary" if name != family else "counter" if name.endswith("_total") else "gauge"
    return f"# HELP {name} {help_of(name)}\n# TYPE {name} {kind}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
