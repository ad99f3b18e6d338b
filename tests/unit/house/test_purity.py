"""Pure modules do nothing but decide."""

from __future__ import annotations

import ast
from configparser import ConfigParser
from pathlib import Path

from tests.unit.house.source import MODULES, REPOSITORY, short, tree

READS_FILES = "dynaplan/simulation/traces/"
"""Beside the pure simulation: it reads the files of recorded traffic."""


def test_pure_modules_do_no_io_by_other_means_than_the_import_contract_sees() -> None:
    found = {short(module): names_used(tree(module)) & IMPURE for module in pure_modules()}
    assert found
    assert {name: names for name, names in found.items() if names} == {}


def pure_modules() -> list[Path]:
    """The modules that the contract *pure* of setup.cfg names, those of packages included."""
    setup = ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    names = setup["importlinter:contract:pure"]["source_modules"].split()
    places = tuple(f"{name.replace('.', '/')}{end}" for name in names for end in (".py", "/"))
    return [
        module
        for module in MODULES
        if short(module).startswith(places) and not short(module).startswith(READS_FILES)
    ]


IMPURE = frozenset(
    {"print", "open", "input", "exec", "eval", "__import__", "breakpoint"}
    | {"pathlib", "io", "sys", "tempfile", "shutil", "secrets", "uuid", "datetime", "urllib", "http"}
)
"""Builtins and modules of the standard library that ``setup.cfg`` does not name."""


def names_used(module: ast.Module) -> set[str]:
    """The builtins that are called and the modules that are imported."""
    found = set()
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Name(id=name)):
                found.add(name)
            case ast.Import(names=names):
                found |= {each.name.partition(".")[0] for each in names}
            case ast.ImportFrom(module=str(name)):
                found.add(name.partition(".")[0])
    return found
