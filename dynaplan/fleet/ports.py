"""Ports of the fleet: the statefile, claims on GPUs of the machine, and learnt start-up times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path


class DocumentStore(Protocol):
    """One JSON document, the statefile, replaced as a whole."""

    def read(self) -> dict[str, Any] | None:
        """Return the document, None when there is none; raises StatefileCorrupt."""
        ...

    def write(self, document: dict[str, Any]) -> None:
        """Replace the document as a whole; raises StatefileUnwritable, and the old one stays then."""
        ...

    def remove(self) -> None:
        """Delete the document; nothing happens when there is none."""
        ...

    def set_aside(self) -> Path:
        """Move a document that cannot be read out of the way; return its new path."""
        ...


class Claims(Protocol):
    """One arbiter's claims on GPUs of this machine, by UUID. Methods raise DeploymentError."""

    def claim(self, uuids: Iterable[str]) -> set[str]:
        """Claim these GPUs; return the subset that is now ours."""
        ...

    def release(self, uuids: Iterable[str]) -> None:
        """Give these GPUs back; nothing happens for one that is not this process's."""
        ...

    def foreign(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the subset that other living arbiters hold: UUID -> the holder, in words."""
        ...


class StartupTimes(Protocol):
    """The durations of earlier starts, in seconds, by what they depend on. A cache: it never raises."""

    def read(self) -> dict[str, list[float]]:
        """Return the last durations of every key, oldest first."""
        ...

    def learn(self, key: str, seconds: float) -> None:
        """Add the duration of a start under its key; the oldest of a few is forgotten."""
        ...
