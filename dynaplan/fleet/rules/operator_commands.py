"""Commands that a person gives circus about workers, with ``circusctl``: what comes of each.

circus does not know what a worker is: ``incr`` of its watcher would say ok and start nothing, ``stop`` would
be a crash that the fleet plugin mends. So the arbiter asks here first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

_WHOLE_DEPLOYMENT = {
    "stop": "`dynaplan stop`, or circusctl quit, ends the deployment in order",
    "start": "everything runs already; `dynaplan scale decode=N` starts workers",
    "restart": "name one worker, as in: circusctl restart dynamo_VllmWorker",
    "reload": "name one worker, as in: circusctl restart dynamo_VllmWorker",
}

_OF_A_WORKER = {
    "incr": "`dynaplan scale decode=N`, or prefill=N, sets the number of workers",
    "decr": "`dynaplan scale decode=N`, or prefill=N, sets the number of workers and drains the others",
    "stop": "`dynaplan scale decode=N`, or prefill=N, drains the workers that are too many; "
    "circusctl restart {name} replaces this one",
    "start": "it is started by itself; `dynaplan scale decode=N`, or prefill=N, tries failed ones again",
    "reload": "circusctl restart {name} drains it, and starts another in its place",
    "rm": "`dynaplan scale decode=N`, or prefill=N, removes workers after their requests",
    "set": "options are given to `dynaplan serve`, which sets them for all workers of a service",
}


@dataclass(frozen=True)
class CommandAnswer:
    """The answer to a command: a refusal in words, or workers to replace; neither means "carry it out"."""

    refusal: str = ""
    to_replace: tuple[str, ...] = ()


def answer(command: str, properties: Mapping[str, Any], workers: Iterable[str]) -> CommandAnswer:
    """Judge one command; ``workers`` are the names of the workers' watchers."""
    command, pattern = command.lower(), properties.get("name")
    if not isinstance(pattern, str) or not pattern:
        words = _WHOLE_DEPLOYMENT.get(command)
        return CommandAnswer(refusal=f"{command} of everything: {words}") if words else CommandAnswer()
    named = tuple(_matching(pattern, workers))
    if not named:
        return CommandAnswer()
    if command == "restart":
        return CommandAnswer(to_replace=named)
    if command not in _OF_A_WORKER:
        return CommandAnswer()
    words = _OF_A_WORKER[command].format(name=named[0])
    return CommandAnswer(refusal=f"{named[0]} is a worker of dynaplan: {words}")


def _matching(pattern: str, names: Iterable[str]) -> Iterable[str]:
    """The names that circus would find: it ignores case, and takes patterns of the shell."""
    return (name for name in names if fnmatchcase(name.lower(), pattern.lower()))
