"""The journal of measurements, written as soon as they are known, so that an interruption costs nothing.

Each line is one JSON object: the point and the fingerprint of its configuration, and the values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from dynaplan.util.errors import ConfigError

FILE_NAME = "measurements.jsonl"
"""The name of the journal in the output directory."""


def fingerprint(*documents: object) -> str:
    """Return a short name of a configuration; equal for equal JSON documents."""
    text = json.dumps(documents, sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()[:16]


class Journal:
    """The measurements of an output directory. Raises ConfigError when its file cannot be read or written."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._known: dict[str, dict[str, Any]] = {}
        self._needs_newline = False
        self._read()

    def find(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the values that were written for that key, None without any."""
        return self._known.get(_text(key))

    def add(self, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Append one measurement as a line; raises ConfigError when it cannot be written."""
        line = json.dumps({"key": dict(key), "values": dict(values)})
        try:
            with self._path.open("a") as file:
                file.write(("\n" if self._needs_newline else "") + line + "\n")
        except OSError as error:
            raise _unusable(self._path, error) from error
        self._needs_newline = False
        self._known[_text(key)] = dict(values)

    def _read(self) -> None:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            raise _unusable(self._path, error) from error
        self._needs_newline = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                self._known[_text(entry["key"])] = dict(entry["values"])
            except (ValueError, KeyError, TypeError):
                continue  # a write that was interrupted; it is measured anew


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _unusable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"--output-dir: {path} cannot be used: {error}", hint="Expected a directory of yours.")
