"""The rules of ``promtool check metrics``, as far as they can be broken here, and promtool itself if present.

Source of the rules: prometheus/client_golang, ``testutil/promlint``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from prometheus_client.parser import text_string_to_metric_families

KNOWN = {
    "kvstats_gpu_cache_usage_percent": "Dynamo's name",
    "observed_ttft_ms": "Dynamo's name",
    "observed_itl_ms": "Dynamo's name",
    "estimated_ttft_ms": "Dynamo's name",
    "estimated_itl_ms": "Dynamo's name",
    "sla_target_ttft_ms": "Dynamo's name",
    "sla_target_itl_ms": "Dynamo's name",
}
"""Ends of names whose unit the rules object to, and the reason why they stay."""

ENGINES_OWN = "should not contain ':'"
"""The end of an objection that stays: vLLM and others have colons in their names, which the rules keep for
recording rules."""

_UNITS = re.compile(r"_(ms|milliseconds|minutes|hours|days|percent|kb|mb|gb|kilobytes|megabytes|bits)(_|$)")
_TYPES = re.compile(r"(^|_)(gauge|counter|histogram|summary)(_|$)")


def faults(text: str) -> list[str]:
    """What a reader of the text would object to, known exceptions apart."""
    found = [f"{name}: {why}" for name, why in _faults(text) if not _is_known(name)]
    return found + _promtool(text)


def _faults(text: str) -> list[tuple[str, str]]:
    found = []
    described = set(re.findall(r"^# HELP (\S+) \S", text, re.M))
    for family in text_string_to_metric_families(text):
        name = family.name
        told = {name, f"{name}_total"} & described
        if not told or not family.documentation.strip() or family.documentation == "Multiprocess metric":
            found.append((name, "no help text"))
        if family.type == "unknown":
            found.append((name, "no type"))
        if family.type == "counter" and f"{name}_total" not in text:
            found.append((name, "a counter ends in _total"))
        if family.type == "gauge" and name.endswith(("_total", "_sum", "_count", "_bucket")):
            found.append((name, "a gauge does not end so"))
        if _UNITS.search(name):
            found.append((name, "not a base unit"))
        if _TYPES.search(name) or re.search("[A-Z]", name):
            found.append((name, "no types and no capitals in names"))
    return found


def _is_known(name: str) -> bool:
    return name.endswith(tuple(KNOWN))


def promtool(*arguments: str, text: str = "") -> tuple[int, list[str]]:
    """Run promtool: its exit code, and the lines that it printed; (0, []) where there is none."""
    program = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if not program:
        return 0, []
    result = subprocess.run(
        [program, *arguments], input=text, capture_output=True, text=True, check=False, timeout=60
    )
    return result.returncode, [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]


def _promtool(text: str) -> list[str]:
    _, lines = promtool("check", "metrics", text=text)
    names = [(line, line.partition(" ")[0]) for line in lines]
    return [
        line for line, name in names if not _is_known(name) and not any(mark in name for mark in ENGINES_OWN)
    ]
