"""The house rules that no linter sees. Sizes, docstrings, and documents that say what the code says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import click

from dynaplan.cli.main import COMMANDS, group
from dynaplan.domain.lifecycle import HOLDS_GPUS, LIFECYCLE
from dynaplan.domain.settings.fields import option_name
from dynaplan.domain.settings.planner import PlannerSettings
from dynaplan.options import stock as options
from dynaplan.options.tables import kebab
from dynaplan.planner.service import PLANNER

REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = sorted((REPOSITORY / "dynaplan").rglob("*.py")) + sorted((REPOSITORY / "graphs").glob("*.py"))
GUIDES = sorted((REPOSITORY / "docs" / "guides").glob("*.md"))
DOCUMENTS = sorted(
    [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "statefiles" / "README.md"]
)

MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 50
MOST_METHODS_OF_A_PORT = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef


def short(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def text_of(*documents: Path) -> str:
    return "\n".join(document.read_text() for document in documents)


# -- sizes and docstrings ------------------------------------------------------------------------------


def test_a_file_is_small() -> None:
    sizes = {short(module): len(module.read_text().splitlines()) for module in MODULES}
    assert {name: lines for name, lines in sizes.items() if lines > MOST_LINES_OF_A_FILE} == {}


def test_a_function_is_small() -> None:
    sizes = {
        f"{short(module)}:{node.name}": length(node)
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, Function)
    }
    assert {name: lines for name, lines in sizes.items() if lines > MOST_LINES_OF_A_FUNCTION} == {}


def length(function: Function) -> int:
    """Its lines, decorators apart; those of a command, whose parameters are its options, from its body on."""
    is_command = any("click" in ast.unparse(each) for each in function.decorator_list)
    first = function.body[0].lineno if is_command else function.lineno
    return (function.end_lineno or 0) - first + 1


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


def is_package(module: Path) -> bool:
    return module.name == "__init__.py"


# -- purity and ports ----------------------------------------------------------------------------------


def test_the_core_does_no_io_by_other_means_than_the_import_contract_sees() -> None:
    pure = [module for module in MODULES if {"core", "domain"} & set(short(module).split("/"))]
    found = {short(module): names_used(tree(module)) & IMPURE for module in pure}
    assert {name: names for name, names in found.items() if names} == {}


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


def test_a_port_has_at_most_six_methods() -> None:
    classes = [node for node in tree(REPOSITORY / "dynaplan/ports.py").body if isinstance(node, ast.ClassDef)]
    ports = [node for node in classes if "Protocol" in map(ast.unparse, node.bases)]
    sizes = {node.name: sum(isinstance(each, Function) for each in node.body) for node in ports}
    assert sizes
    assert {name: size for name, size in sizes.items() if size > MOST_METHODS_OF_A_PORT} == {}


# -- documents -----------------------------------------------------------------------------------------


def test_the_architecture_tells_every_state_of_a_worker_its_moves_and_its_gpus() -> None:
    section = text_of(REPOSITORY / "docs/architecture.md").partition("## A worker's life")[2]
    rows = re.findall(r"^\| (\w+) \| [^|]* \| (yes|no) \| ([^|]*) \|$", section, re.M)
    told = {state: (holds == "yes", set(moves.split(", "))) for state, holds, moves in rows}
    assert told == {
        start.value: (start in HOLDS_GPUS, {end.value for end in ends} or {"-"})
        for start, ends in LIFECYCLE.items()
    }


def test_every_link_leads_somewhere() -> None:
    broken = [
        f"{short(document)}: {target}"
        for document in DOCUMENTS
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
        if "://" not in target and not (document.parent / target).exists()
    ]
    assert broken == []


def test_every_decision_is_linked_and_numbered_once() -> None:
    folder = REPOSITORY / "docs" / "decisions"
    names = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert [name[:4] for name in names] == [f"{number:04}" for number in range(1, len(names) + 1)]
    index = (folder / "README.md").read_text()
    assert [name for name in names if f"({name})" not in index] == []


def known_options() -> set[str]:
    """Every option that there is: of services, of the planner, of the commands."""
    of_services = {
        kebab(name)
        for table in vars(options).values()
        if isinstance(table, dict) and table and all(isinstance(each, str) for each in table)
        for name in table
    }
    commands = [group.get_command(click.Context(group), name) for name in COMMANDS]
    of_commands = {
        name.lstrip("-")
        for command in commands
        if command
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    planner = {option_name(each) for each in fields(PlannerSettings)} | set(PLANNER)
    return of_services | of_commands | planner | {"help", "version"}


def test_every_option_in_a_guide_exists() -> None:
    named = {
        f"{short(guide)}: {name}"
        for guide in GUIDES
        for name in options_in(guide.read_text()) - known_options() - flags_of_the_engine(guide)
    }
    assert named == set()


def flags_of_the_engine(guide: Path) -> set[str]:
    """Flags that a guide of one engine may name: those in the modules of the engine's adapter."""
    engines = REPOSITORY / "dynaplan/adapters/engines"
    modules = [*engines.glob(f"{guide.stem}.py"), *engines.glob(f"{guide.stem}/*.py")]
    return set(re.findall(r"[a-z]+(?:-[a-z]+)*", text_of(*modules)))


def options_in(text: str) -> set[str]:
    """Flags, ``--Service.key`` overrides, and the first column of tables of an "option" or a "key"."""
    found = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)\b", text)) - OF_OTHER_PROGRAMS
    found |= {kebab(name) for name in re.findall(r"--[A-Z]\w+\.([a-z][\w-]+)", text)} - {"key"}
    for table in re.findall(r"^\| (?:option|key)[^\n]*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M):
        found |= {
            kebab(name) for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])
        }
    return found


OF_OTHER_PROGRAMS = frozenset(
    {
        *("logdir", "endpoint", "stream-interval", "no-deps", "extra-index-url"),
        *(
            flag.removeprefix("--")
            for file in (REPOSITORY / "tests" / "fixtures" / "engines").glob("*/flags.txt")
            for flag in file.read_text().split()
        ),
    }
)
"""TensorBoard's, circusctl's, pip's, and those of engines that dynaplan passes on."""


def variables_in(text: str) -> set[str]:
    found = set(re.findall(r"\b((?:DYN|DYNAMO|DYNAPLAN|ETCD|NATS)_[A-Z_]*[A-Z])\b", text))
    return found - {"ETCD_AUTH", "NATS_AUTH", "DYN_CIRCUS"}


def texts_in(module: Path) -> str:
    """The module's string literals; a name that is put together is written out."""
    literals = (node.value for node in ast.walk(tree(module)) if isinstance(node, ast.Constant))
    text = "\n".join(literal for literal in literals if isinstance(literal, str))
    if 'f"DYN_CIRCUS_{name}_PORT"' in module.read_text():
        text += "\nDYN_CIRCUS_ENDPOINT_PORT DYN_CIRCUS_PUBSUB_PORT"
    return text


def test_every_environment_variable_is_documented_and_every_documented_one_is_used() -> None:
    assert variables_in(text_of(*DOCUMENTS)) == variables_in("\n".join(map(texts_in, MODULES)))


def test_the_changelog_and_the_guides_name_the_commands_that_exist() -> None:
    changelog = text_of(REPOSITORY / "CHANGELOG.md")
    told = set(
        re.findall(r"`(?:dynaplan )?([a-z-]+)", "".join(re.findall(r"^- `dynaplan.*", changelog, re.M)))
    )
    assert told == set(COMMANDS)
    shown = re.findall(
        r"^    dynaplan ([\w-]+)|`dynaplan ([\w-]+)", text_of(REPOSITORY / "README.md", *GUIDES), re.M
    )
    assert {name for pair in shown for name in pair if name} <= set(COMMANDS)


# -- the repository ------------------------------------------------------------------------------------

FOLDERS = ("dynaplan", "graphs", "statefiles", "tests", "docs", ".ci")
SUFFIXES = (".py", ".md", ".yaml", ".cfg", ".toml", ".ini", ".json", "")


def test_no_path_of_a_developers_machine_is_written_down() -> None:
    files = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*")]
    files += [path for path in REPOSITORY.iterdir() if not path.name.startswith(".")]
    homes = re.compile(r"(?<![\w.])/(?:work|home/\w+|Users/\w+|root)/\w+")
    found = [
        f"{short(path)}:{number}"
        for path in files
        if path.is_file() and path.suffix in SUFFIXES and path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if homes.search(line)
    ]
    assert found == []
