"""Joins metrics of many processes, in Prometheus' text format, into one text. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

WORKER = "worker"
"""The label that tells whose sample it is."""


@dataclass
class _MetricFamily:
    head: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


def merged(texts: Iterable[tuple[str, str]]) -> str:
    """Return the texts of (worker, metrics) as one, each family with one head and all samples below it.

    Prometheus refuses a text that says the type of a metric twice. Samples get the label ``worker`` unless
    they have it, or the name is empty. The head of a family is that of the first text that has it.
    """
    families: dict[str, _MetricFamily] = {}
    for worker, text in texts:
        label = f'{WORKER}="{escaped(worker)}"' if worker else ""
        headed, name = set[str](), ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                name = line.split(" ", 3)[2]
                family = families.setdefault(name, _MetricFamily())
                if name in headed or not family.head:
                    headed.add(name)
                    family.head.append(line)
            elif line and not line.startswith("#"):
                sample = line.partition("{")[0].partition(" ")[0]
                owner = name if name and sample.startswith(name) else sample
                families.setdefault(owner, _MetricFamily()).samples.append(_labelled(line, label))
    lines = [line for each in families.values() if each.samples for line in (*each.head, *each.samples)]
    return "".join(f"{line}\n" for line in lines)


def _labelled(line: str, label: str) -> str:
    name, brace, rest = line.partition("{")
    if not label or f'{WORKER}="' in rest:
        return line
    if not brace:
        name, _, value = line.partition(" ")
        return f"{name}{{{label}}} {value}"
    return f"{name}{{{label}{'' if rest.startswith('}') else ','}{rest}"


def escaped(text: str) -> str:
    """Return a label's value as it stands between its quotes."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
