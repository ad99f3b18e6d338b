"""The file of keys: who may use a deployment, for which models, and how much.

    alice:
      hash: sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae
      requests-per-minute: 60

It holds no key, only hashes. A key is 256 random bits: its hash needs neither salt nor a slow function, since
nobody can try keys until one fits. A file that others may read or write is refused all the same: whoever can
write it lets himself in. Commands change it entry by entry, and leave comments where they are.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dynaplan.config.settings.fields import kebab, options_of
from dynaplan.config.settings.keys import KeySettings
from dynaplan.config.yaml_file import EXAMPLE as SECTIONS_EXAMPLE
from dynaplan.config.yaml_file import read_sections
from dynaplan.util.documents import shown
from dynaplan.util.errors import ConfigError, all_faults, nearest

EXAMPLE = "`dynaplan keys add NAME` makes an entry, and prints its key once."

NAME = re.compile(r"[A-Za-z0-9][\w.@-]{0,63}", re.ASCII)


def new_key() -> str:
    """Return a new key: 256 random bits behind the beginning that programs know a key by."""
    return f"sk-{secrets.token_urlsafe(32)}"


def hash_of(key: str | bytes) -> str:
    """Return a key's hash as the file has it."""
    return f"sha256:{hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()}"


def read_keys_file(path: Path) -> dict[str, KeySettings]:
    """Return the keys of a file by their hashes.

    Raises ConfigError for a file that is not this user's alone, and names key and value that are wrong in it.
    """
    try:
        with path.open(encoding="utf-8") as file:
            _check_private(path, os.fstat(file.fileno()))
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"api-keys: {path} cannot be read: {reason}", hint=EXAMPLE) from None
    return parse_keys(text, str(path))


def _check_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"api-keys: {path} is no file", hint=EXAMPLE)
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o077:
        raise ConfigError(
            f"api-keys: {path} has mode {stat.S_IMODE(status.st_mode):04o}: others may read or change it",
            hint=f"Expected a file of yours: chmod 600 {path}",
        )


def parse_keys(text: str, source: str) -> dict[str, KeySettings]:
    """Return the keys that a file's text holds by their hashes; raises ConfigError, naming the ``source``."""
    found: dict[str, KeySettings] = {}
    with all_faults() as faults:
        for name, entry in _entries(text, source).items():
            with faults.gathering(prefix=f"{source}: {name}: "):
                key = _read_entry(name, entry)
                if key.hash in found:
                    same = found[key.hash].name
                    raise ConfigError(f"its hash is {same}'s too", hint="Give each of them a key of its own.")
                found[key.hash] = key
    return found


def _entries(text: str, source: str) -> Mapping[str, Mapping[str, Any]]:
    if not any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines()):
        return {}  # every key was revoked
    try:
        return read_sections(text, source)
    except ConfigError as error:
        if error.hint == SECTIONS_EXAMPLE:
            error.hint = f"Expected a name, and below it what is known of its key. {EXAMPLE}"
        raise


def _read_entry(name: str, entry: Mapping[str, Any]) -> KeySettings:
    if not NAME.fullmatch(name):
        raise ConfigError("that is no name", hint="Expected letters, digits, and . _ @ - behind the first.")
    known = options_of(KeySettings)
    if unknown := sorted(key for key in entry if kebab(key) not in known):
        raise ConfigError(f"a key has no option {unknown[0]!r}", hint=nearest(kebab(unknown[0]), known))
    key = replace(KeySettings.from_options(entry), name=name)
    expires_unix_s(key)
    return key


def expires_unix_s(key: KeySettings) -> float:
    """Return the moment from which on a key is refused, infinite for never; raises ConfigError."""
    if key.expires is None:
        return math.inf
    try:
        return datetime.fromisoformat(key.expires).timestamp()
    except ValueError:
        hint = "Expected a day or a moment, as 2027-01-31 or 2027-01-31T18:00."
        raise ConfigError(f"expires is {shown(key.expires)}", hint=hint) from None


def with_entry(text: str, key: KeySettings) -> str:
    """Return the file's text with one more entry at its end."""
    said = {name: value for name, value in key.to_options().items() if value != _DEFAULTS.get(name)}
    lines = [f"{key.name}:", *(f"  {name}: {json.dumps(value)}" for name, value in said.items())]
    before = text if not text or text.endswith("\n") else f"{text}\n"
    return before + "\n".join(lines) + "\n"


_DEFAULTS = KeySettings().to_options()


def without_entry(text: str, name: str) -> str:
    """Return the file's text without an entry that is in it; comments above the next one stay."""
    import yaml

    node = yaml.compose(text)
    assert node
    entries = node.value
    first = next(key.start_mark.line for key, _ in entries if key.value == name)
    later = [key.start_mark.line for key, _ in entries if key.start_mark.line > first]
    lines = text.splitlines(keepends=True)
    end = min(later, default=len(lines))
    while end - 1 > first and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
        end -= 1
    return "".join([*lines[:first], *lines[end:]])
