"""Files of keys for tests: the key of ``alice`` is ``sk-alice``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dynaplan.config.keys import hash_of


def write_keys(file: Path, keys: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write the entries, each with the hash of its key, in the place of what is there."""
    entries = {name: {"hash": hash_of(f"sk-{name}"), **entry} for name, entry in keys.items()}
    new = file.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(yaml.safe_dump(entries))
    new.replace(file)
    return file


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{name}"}
