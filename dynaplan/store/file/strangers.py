"""Strangers: files in a store's directory that no key has."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from dynaplan.store.file.names import place_of

MOST_NAMED = 3
"""The most strangers that a message names."""

MOST_DIRECTORIES = 2
"""Directories above a key's file, at most."""


def strangers(directory: Path, private: str, keys: Iterable[str]) -> tuple[str, ...]:
    """Return the paths, relative to the directory, of all but the keys' files and what is private."""
    places = (place_of(key) for key in keys)
    known = {os.path.join(*directories, name) for directories, name in places}
    return tuple(
        sorted(path for path in _files(directory, "", MOST_DIRECTORIES, private) if path not in known)
    )


def named(paths: tuple[str, ...]) -> str:
    """Return the first of them in words, and how many there are beside."""
    words = ", ".join(repr(path[:80]) for path in paths[:MOST_NAMED])
    return words if len(paths) <= MOST_NAMED else f"{words} and {len(paths) - MOST_NAMED} more"


def _files(directory: Path, under: str, depth: int, left_out: str) -> Iterator[str]:
    """Yield files, and directories deeper than any key's; one that cannot be read is passed over."""
    try:
        entries = list(os.scandir(directory / under))
    except OSError:
        return
    for entry in entries:
        path = os.path.join(under, entry.name)
        if path == left_out:
            continue
        if depth and entry.is_dir(follow_symlinks=False):
            yield from _files(directory, path, depth - 1, "")
        else:
            yield path
