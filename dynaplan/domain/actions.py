"""What the supervisor is to do next, one frozen value per step.

Each action carries the worker as it is once the action has begun, so that whoever carries it out can
write that down first and act afterwards: after a crash in between, the record says what was meant.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynaplan.domain.lifecycle import Worker


@dataclass(frozen=True)
class Remove:
    """Forget a worker without process (failed, awaiting its restart, gone): remove its watcher and entry."""

    worker: Worker
    why: str


@dataclass(frozen=True)
class Drain:
    """Tell a worker to leave: it gets no new requests, finishes those it holds, and its process ends."""

    worker: Worker
    why: str


@dataclass(frozen=True)
class Restart:
    """Start the process of a crashed worker again, in its own watcher, with its own GPUs."""

    worker: Worker


@dataclass(frozen=True)
class Start:
    """Start a new worker: a watcher of that name, with those GPUs."""

    worker: Worker


@dataclass(frozen=True)
class Waiting:
    """A worker of the component is wanted but cannot be started yet. Nothing to do but to say so."""

    component: str
    why: str


Action = Remove | Drain | Restart | Start | Waiting
