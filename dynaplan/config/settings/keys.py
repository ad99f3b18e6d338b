"""What the file of keys says of one key: its hash, its holder's limits, and what it may do."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dynaplan.config.settings.fields import Settings, Texts, option
from dynaplan.util.documents import shown
from dynaplan.util.errors import ConfigError

WEIGHTS = {"high": 4.0, "normal": 1.0, "low": 0.25}
"""Priority -> part of the tokens that a key gets beside others that wait too."""

_HASH = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class KeySettings(Settings):
    """One entry of the file. ``name`` is its key there: the holder, whom metrics and reports name."""

    hash: str = option("", "`sha256:` and the key's SHA-256 in hexadecimal; `dynaplan keys add` writes it")
    models: list[str] | None = option(
        None, "Models that it may use, by any of their names", kind=Texts, default_text="all"
    )
    concurrency: int | None = option(
        None, "Requests that it may have at a time, waiting ones included", minimum=1, default_text="no limit"
    )
    requests_per_minute: int | None = option(
        None, "Requests that are accepted of it in a minute", minimum=1, default_text="no limit"
    )
    tokens_per_minute: int | None = option(
        None, "Tokens of its prompts and answers in a minute", minimum=1, default_text="no limit"
    )
    priority: str = option("normal", "Its part where several keys wait, 4, 1 or 1/4", choices=tuple(WEIGHTS))
    expires: str | None = option(
        None, "Day or moment from which on it is refused, as `2027-01-31`; local time", default_text="never"
    )
    admin: bool = option(False, "May load and unload models, read logs and use the paths of engines")
    name: str = ""

    def check(self, given: frozenset[str] = frozenset()) -> None:
        if not _HASH.fullmatch(self.hash):
            raise ConfigError(
                f"hash is {shown(self.hash)}",
                hint="Expected sha256: and 64 digits of 0-9a-f, never the key itself.",
            )
        if self.models is not None and not self.models:
            raise ConfigError(
                "models is empty", hint="Expected names of models; without `models`, all are its."
            )

    @property
    def weight(self) -> float:
        return WEIGHTS[self.priority]
