"""Docstrings are there, and are for a reader who does not know yet."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.unit.house.source import MODULES, Function, is_package, short, tree

RIDDLES = re.compile(
    r"\b(who|whom|whoever|whomever|so many|so much|so long|so often|those that|those which|those who"
    r"|what it was|that which)\b",
    re.I,
)
"""Relative clauses in the place of a noun."""

NEITHER_VERB_NOR_NOUN = frozenset(
    {"What", "Who", "Whose", "Whoever", "Those", "That", "This", "These", "So", "As", "Its", "Their", "Where"}
    | {"When", "How", "Whether", "It", "They", "Everything", "Nothing", "Something", "Of", "In", "By", "For"}
    | {"To", "With", "Without", "From", "If", "Until", "Only", "Same"}
)


def test_everything_public_has_a_docstring() -> None:
    missing = [
        f"{short(module)}:{name}"
        for module in MODULES
        for name, node in [("", tree(module)), *public(tree(module).body)]
        if not ast.get_docstring(node)
    ]
    assert missing == []


def public(body: list[ast.stmt], of: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for node in body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        decorators = [ast.unparse(each) for each in node.decorator_list]
        if any(each == "overload" or each.endswith(".setter") for each in decorators):
            continue
        yield f"{of}{node.name}", node
        if isinstance(node, ast.ClassDef):
            yield from public(node.body, f"{of}{node.name}.")


def test_a_package_says_what_it_is_for() -> None:
    packages = {
        short(module): ast.get_docstring(tree(module)) or "" for module in MODULES if is_package(module)
    }
    assert {name for name, about in packages.items() if len(about) < 30} == set()


def test_a_docstring_begins_with_a_verb_or_a_noun_and_names_what_it_speaks_of() -> None:
    assert [riddle for module in MODULES for riddle in riddles(module)] == []


def riddles(module: Path) -> Iterator[str]:
    for line, text in docstrings(tree(module)):
        words = RIDDLES.findall(text)
        if (first := re.match(r"\W*(\w+)", text)) and first[1] in NEITHER_VERB_NOR_NOUN:
            words.append(f"begins with {first[1]}")
        if words:
            yield f"{short(module)}:{line}: {', '.join(words)}"


def docstrings(parsed: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of modules, classes, functions, fields and constants."""
    for node in ast.walk(parsed):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text
