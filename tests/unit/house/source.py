"""The repository's files, parsed: the house tests read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGE = REPOSITORY / "dynaplan"
TESTS = REPOSITORY / "tests"
MODULES = sorted(PACKAGE.rglob("*.py")) + sorted((REPOSITORY / "graphs").glob("*.py"))
TEST_MODULES = sorted(TESTS.rglob("*.py"))
GUIDES = sorted((REPOSITORY / "docs" / "guides").glob("*.md"))
DOCUMENTS = sorted(
    [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "statefiles" / "README.md"]
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def short(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def text_of(*documents: Path) -> str:
    return "\n".join(document.read_text() for document in documents)


def functions(module: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree(module)) if isinstance(node, Function))


def more_than(most: int, sizes: dict[str, int]) -> dict[str, int]:
    """The names whose size is above the limit."""
    return {name: size for name, size in sizes.items() if size > most}
