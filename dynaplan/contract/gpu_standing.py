"""What is known of GPUs that are ill: which are set apart, why, and what a person has said about them.

One JSON object under ``v1/{namespace}/planner_extensions/set_apart``, by the index of the GPU, written by the
fleet plugin and by ``dynaplan gpus --retire`` and ``--readmit``, and kept in the statefile. A GPU that was
never ill is not in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dynaplan.contract.holds import MAX_GPU_INDEX
from dynaplan.util.documents import (
    number_field,
    object_field,
    parse_object,
    text_field,
    whole_field,
    whole_number,
)

SET_APART = "set_apart"
"""The name of the key, one of ``store_keys.EXTENSIONS``."""


@dataclass(frozen=True)
class GpuStanding:
    """Whether a GPU is set apart (``is_apart``: no worker gets it), in use again, or in use although ill.

    ``why`` is the symptom in words, at ``since_unix_s``; ``by`` the person who has retired it. One with a
    ``retry_unix_s`` (0: none) is readmitted then, if the symptom has passed; ``times`` is how often it was
    set apart, which makes that later each time. Symptoms in ``accepted``, by their keys, do not count any
    more: a person has readmitted the GPU in spite of them.
    """

    is_apart: bool = True
    why: str = ""
    since_unix_s: float = 0.0
    retry_unix_s: float = 0.0
    times: int = 1
    symptom: str = ""
    accepted: tuple[str, ...] = ()
    by: str = ""

    @property
    def words(self) -> str:
        """Why no worker gets it: ``set apart: Xid 79, ...``."""
        return f"retired by {self.by}" if self.by else f"set apart: {self.why}"

    def readmitted(self) -> GpuStanding:
        """Return the standing after a person readmitted the GPU: its present symptom does not count again."""
        accepted = tuple(dict.fromkeys(filter(None, (*self.accepted, self.symptom))))
        return replace(self, is_apart=False, accepted=accepted, by="", retry_unix_s=0.0, why="", symptom="")


@dataclass(frozen=True)
class GpuStandings:
    """The standings of a deployment's GPUs, by index."""

    by_gpu: Mapping[int, GpuStanding] = field(default_factory=dict)

    @classmethod
    def from_text(cls, text: str) -> GpuStandings:
        """Read the key's value; "" is a key that is missing. Raises ValueError, and nothing else."""
        document = parse_object(text) if text else {}
        return cls({_index(name): _standing(object_field(document, name)) for name in document})

    def to_text(self) -> str:
        """Write them as the store's key has them: JSON without spaces."""
        document = {str(index): asdict(each) for index, each in sorted(self.by_gpu.items())}
        return json.dumps(document, separators=(",", ":"))

    def with_gpu(self, index: int, standing: GpuStanding) -> GpuStandings:
        return GpuStandings({**self.by_gpu, index: standing})

    def without_expired(self, now_s: float) -> GpuStandings:
        """Return all of them: none ends by the clock alone."""
        return self

    @property
    def apart(self) -> dict[int, str]:
        """The GPUs that no worker gets: index -> why."""
        return {index: each.words for index, each in sorted(self.by_gpu.items()) if each.is_apart}

    @property
    def ill_in_use(self) -> dict[int, str]:
        """The GPUs that are ill and in use all the same, since no other is left: index -> the symptom."""
        return {
            index: each.why for index, each in sorted(self.by_gpu.items()) if each.why and not each.is_apart
        }

    @property
    def descriptions(self) -> Mapping[str, Any]:
        return {}


def _index(name: str) -> int:
    index = whole_number(name)
    if index is None or not 0 <= index <= MAX_GPU_INDEX:
        raise ValueError(f"{name[:40]!r}: expected the index of a GPU")
    return index


def _standing(document: Mapping[str, Any]) -> GpuStanding:
    accepted = document.get("accepted", [])
    if not isinstance(accepted, list):
        raise ValueError("'accepted': expected a list")
    return GpuStanding(
        document.get("is_apart", True) is True,
        text_field(document, "why", ""),
        number_field(document, "since_unix_s", 0.0),
        number_field(document, "retry_unix_s", 0.0),
        whole_field(document, "times", 1),
        text_field(document, "symptom", ""),
        tuple(map(str, accepted)),
        text_field(document, "by", ""),
    )
