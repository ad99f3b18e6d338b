"""Write docs/licences.md, of what requirements.lock installs here: ``python -m tests.licences``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[1]
LOCK = REPOSITORY / "requirements.lock"
PAGE = REPOSITORY / "docs" / "licences.md"

HEAD = """# Licences of what is installed

`requirements.lock` installs these packages beside dynaplan, which is Apache-2.0. `tox -e lock`
writes this page, from what each package says of itself.

"Copyleft in it" are parts that a package brings along, by the licence files in it: libzmq in pyzmq,
the runtime of gfortran in numpy, root certificates in grpcio, modules that setuptools copied. They
are used unchanged, as parts of their packages; dynaplan's own files contain none of them.

| package | version | licence | copyleft in it |
|---|---|---|---|
"""

COPYLEFT = {
    "AGPL": r"^\s*GNU AFFERO GENERAL PUBLIC LICENSE",
    "LGPL": r"^\s*GNU LESSER GENERAL PUBLIC LICENSE",
    "GPL-3.0-or-later WITH GCC-exception-3.1": r"^License: GPL-3.0-or-later WITH GCC-exception-3.1",
    "GPL": r"^\s*GNU GENERAL PUBLIC LICENSE\n\\s*Version",
    "MPL-2.0": r"^\s*Mozilla Public License,? Version 2|licensed under MPL-2.0",
}
"""Licences that ask for the source, and the words by which a file with one is known."""

PLAIN = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "MIT License": "MIT",
}
"""SPDX identifiers of what packages call their licences otherwise."""


def locked(lock: Path = LOCK) -> Iterator[Requirement]:
    """The requirements of the lock, with their markers."""
    for line in lock.read_text().splitlines():
        if line and not line.startswith(("#", " ")):
            yield Requirement(line.removesuffix("\\"))


def version_of(requirement: Requirement) -> str:
    """The version of a requirement of the lock."""
    (specifier,) = requirement.specifier
    return specifier.version


def versions() -> dict[str, list[str]]:
    """The versions of each package: several where they differ by the Python."""
    found: dict[str, list[str]] = {}
    for requirement in locked():
        found.setdefault(requirement.name, []).append(version_of(requirement))
    return found


def licence(of: Distribution) -> str:
    """The licence that the package states, as an SPDX expression where it is known."""
    stated = [*(of.metadata.get_all("License-Expression") or of.metadata.get_all("License") or [])]
    classifiers = [each for each in of.metadata.get_all("Classifier") or [] if each.startswith("License ::")]
    named = [each.rpartition(":: ")[2] for each in classifiers]
    if len(named) < 2 and stated:
        named = stated[0].strip().splitlines()[:1]
    return " AND ".join(sorted(PLAIN.get(each, each) for each in named)) or "not stated"


def copyleft(of: Distribution) -> str:
    """The copyleft licences among the licence files of the package."""
    names = re.compile("licen|copying|notice", re.I)
    files = [Path(str(each.locate())) for each in of.files or () if names.search(str(each))]
    text = "\n".join(file.read_text(errors="replace") for file in files if file.is_file())
    return ", ".join(name for name, words in COPYLEFT.items() if re.search(words, text, re.M))


def row(name: str, found: list[str]) -> str:
    try:
        of = distribution(name)
    except PackageNotFoundError:
        raise SystemExit(f"{name} is not installed: pip install --require-hashes -r {LOCK.name}") from None
    return f"| {name} | {', '.join(found)} | {licence(of)} | {copyleft(of)} |"


if __name__ == "__main__":
    PAGE.write_text(HEAD + "".join(f"{row(*each)}\n" for each in versions().items()))
