"""The systemd unit that runs a deployment at boot: the values of ``data/dynaplan.service``."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynaplan.config.yaml_file import read_sections
from dynaplan.graph.config import DEPLOYMENT_CONFIG_VARIABLE
from dynaplan.util.errors import ConfigError
from dynaplan.util.masking import looks_secret, mask_secrets

TEMPLATE = Path(__file__).parents[1] / "data" / "dynaplan.service"

PLACE = re.compile(r"\$\{(\w+)\}")
"""The place of a value in the template: ``${name}``."""

CLEANUP_S = 15
"""Seconds that ``serve`` needs after its drain deadline: to kill what is left, and to clean up."""

EXPORTED_VARIABLES = re.compile(r"(DYN|DYNAMO|DYNAPLAN|ETCD|NATS|CUDA_VISIBLE|HF_HOME)[A-Z_]*")
"""The variables of this shell that go into the unit, but for secrets: they configure a deployment."""

EXCLUDED_VARIABLES = ("DYNAPLAN_RUNTIME_DIR", "DYNAPLAN_PARENT_PID")


def unit(arguments: Sequence[str], params: Mapping[str, Any], directory: Path, user: str) -> str:
    """Return the unit of ``dynaplan serve`` with these arguments, in that directory.

    ``params`` are the options in them. It is a unit of the system that runs as ``user``; where that is
    empty, one of the user. Raises ConfigError for what cannot be written into a unit.
    """
    name = params["namespace"] or "dynamo"
    own = [argument for argument in arguments if argument != "--exit-on-failure"]
    words = [sys.executable, "-P", "-m", "dynaplan", "serve", *own, "--exit-on-failure"]
    # Under a supervisor serve is not the main process, and yet the one that notifies.
    is_held = params["supervise"] and params["orphan_grace"]
    values: dict[str, str | list[str]] = {
        "name": _literal(name),
        "notifiers": "all" if is_held else "main",
        "directory": _literal(str(directory)),
        "variables": [_quoted(variable) for variable in _variables(os.environ)],
        "command": " ".join(map(_word, words)),
        "stop_s": str(math.ceil(params["drain_timeout_s"]) + CLEANUP_S),
    }
    return "\n".join(fill_lines(TEMPLATE.read_text(encoding="utf-8"), values | _places(name, user))) + "\n"


def fill_lines(template: str, values: Mapping[str, str | list[str]]) -> list[str]:
    """Return the template's lines with the values in their places, of which a line has at most one.

    A line whose value is a list is repeated for each item. Places in a value are not filled in.
    """
    filled: list[str] = []
    for line in template.splitlines():
        place = PLACE.search(line)
        given = values[place[1]] if place else ""
        for value in [given] if isinstance(given, str) else given:
            filled.append(line.replace(place[0], value) if place else line)
    return filled


def _places(name: str, user: str) -> dict[str, str | list[str]]:
    """Return what differs between a unit of the system and one of the user."""
    unit_name = f"dynaplan-{name}.service"
    if user:
        return {
            "path": f"/etc/systemd/system/{unit_name}",
            "first_steps": f"systemctl daemon-reload && systemctl enable --now {unit_name}",
            "wanted": ["network-online.target"],
            "awaited": ["network-online.target nvidia-persistenced.service"],
            "user": [user],
            "secrets_file": f"/etc/dynaplan/{name}.env",
            "wanted_by": "multi-user.target",
        }
    return {
        "path": f"~/.config/systemd/user/{unit_name}",
        "first_steps": [
            f"systemctl --user daemon-reload && systemctl --user enable --now {unit_name}",
            "loginctl enable-linger   (so that it runs without a login)",
        ],
        "wanted": [],
        "awaited": [],
        "user": [],
        "secrets_file": f"%h/.config/dynaplan/{name}.env",
        "wanted_by": "default.target",
    }


def _variables(environ: Mapping[str, str]) -> list[str]:
    chosen = {
        name: value
        for name, value in sorted(environ.items())
        if EXPORTED_VARIABLES.fullmatch(name) and not looks_secret(name) and name not in EXCLUDED_VARIABLES
    }
    for name, value in chosen.items():
        _refuse_secret(name, value)
    return [f"{name}={value}" for name, value in chosen.items()]


def _refuse_secret(name: str, value: str) -> None:
    """Raise ConfigError if the value of a variable contains a secret, such as a password in a URL."""
    is_config = value and name == DEPLOYMENT_CONFIG_VARIABLE
    document = read_sections(value, name) if is_config else value
    if mask_secrets(document) == document:
        return
    hint = f"Unset it, and write {name}=... into the EnvironmentFile of the unit"
    if (server := name.partition("_")[0]) in ("ETCD", "NATS"):
        hint += f", or write {server}_AUTH_USERNAME and {server}_AUTH_PASSWORD there"
    raise ConfigError(f"{name} holds a secret, and everybody can read the unit", hint=f"{hint}.")


def _literal(text: str) -> str:
    """Return a text without specifiers, such as ``%h``, for systemd; ConfigError if it has several lines."""
    if not text.isprintable():
        raise ConfigError(f"{text!r} cannot stand in a unit", hint="Expected text of one line.")
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """Return one word as systemd.syntax(7) reads it back."""
    escaped = _literal(text).replace("\\", "\\\\").replace('"', '\\"')
    return escaped if re.fullmatch(r"[\w@%+=:,./-]+", text) else f'"{escaped}"'


def _word(text: str) -> str:
    """Return one word of a command, in which a variable would replace ``$``."""
    return _quoted(text).replace("$", "$$")
