"""The house rules that no linter sees. Sizes, docstrings, and documents that say what the code says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import click
import pytest

from dynaplan.cli.main import COMMANDS, group
from dynaplan.domain.fleet import HOLDS_GPUS, LIFECYCLE, WorkerState
from dynaplan.domain.planner_settings import PlannerSettings, option_name
from dynaplan.planner.service import PLANNER
from dynaplan.sdk.options import kebab
from dynaplan.serving import options

REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = sorted((REPOSITORY / "dynaplan").rglob("*.py")) + sorted((REPOSITORY / "graphs").glob("*.py"))
GUIDES = sorted((REPOSITORY / "docs" / "guides").glob("*.md"))
DOCUMENTS = sorted(
    [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "statefiles" / "README.md"]
)

MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 50

Function = ast.FunctionDef | ast.AsyncFunctionDef


def short(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def text_of(*documents: Path) -> str:
    return "\n".join(document.read_text() for document in documents)


# -- sizes and docstrings ------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES, ids=short)
def test_a_file_is_small(module: Path) -> None:
    assert len(module.read_text().splitlines()) <= MOST_LINES_OF_A_FILE


@pytest.mark.parametrize("module", MODULES, ids=short)
def test_every_function_is_small(module: Path) -> None:
    sizes = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(tree(module))
        if isinstance(node, Function) and not is_declaration(node)
    }
    assert {name: lines for name, lines in sizes.items() if lines > MOST_LINES_OF_A_FUNCTION} == {}


def is_declaration(node: Function) -> bool:
    """A command's options are parameters: its length is that of its body."""
    return any("click" in ast.unparse(each) for each in node.decorator_list) and (
        (node.end_lineno or 0) - node.body[0].lineno < MOST_LINES_OF_A_FUNCTION
    )


@pytest.mark.parametrize("module", MODULES, ids=short)
def test_everything_public_has_a_docstring(module: Path) -> None:
    assert ast.get_docstring(tree(module)), "the module has none"
    assert [name for name, node in public(tree(module).body) if not ast.get_docstring(node)] == []


def public(body: list[ast.stmt], of: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for node in body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        if any(ast.unparse(each) == "overload" for each in node.decorator_list):
            continue
        name = f"{of}{node.name}"
        yield name, node
        if isinstance(node, ast.ClassDef):
            yield from public(node.body, f"{name}.")


def test_a_package_says_what_it_is_for() -> None:
    packages = [module for module in MODULES if module.name == "__init__.py"]
    assert [short(each) for each in packages if len(ast.get_docstring(tree(each)) or "") < 30] == []


# -- purity and ports ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", [each for each in MODULES if each.parent.name in ("core", "domain")], ids=short
)
def test_the_core_does_no_io_by_builtins(module: Path) -> None:
    calls = {
        node.func.id
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert calls & {"print", "open", "input", "exec", "eval", "__import__"} == set()
    imported = {
        alias.name.partition(".")[0]
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {
        (node.module or "").partition(".")[0]
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ImportFrom)
    }
    assert imported & {"pathlib", "io", "sys", "tempfile", "shutil", "secrets", "uuid", "datetime"} == set()


def test_a_port_has_at_most_six_methods() -> None:
    ports = [node for node in tree(REPOSITORY / "dynaplan" / "ports.py").body if isinstance(node, ast.ClassDef)]
    protocols = [node for node in ports if any(ast.unparse(base) == "Protocol" for base in node.bases)]
    sizes = {node.name: sum(isinstance(each, Function) for each in node.body) for node in protocols}
    assert protocols
    assert {name: size for name, size in sizes.items() if size > 6} == {}


# -- documents -----------------------------------------------------------------------------------------


def test_the_architecture_names_the_states_and_who_holds_gpus() -> None:
    rows = re.findall(r"^\| (\w+) \| .* \| (yes|no) \|$", text_of(REPOSITORY / "docs/architecture.md"), re.M)
    expected = {state.value: "yes" if state in HOLDS_GPUS else "no" for state in WorkerState}
    assert dict(rows) == expected


def test_the_architecture_shows_every_move_of_the_lifecycle() -> None:
    section = text_of(REPOSITORY / "docs/architecture.md").partition("## A worker's life")[2]
    drawn = {
        (start, end)
        for start, ends in re.findall(r"^ *(\w+) +-> +([\w, ]+)$", section, re.M)
        for end in ends.split(", ")
    }
    assert drawn == {(start.value, end.value) for start, ends in LIFECYCLE.items() for end in ends}


@pytest.mark.parametrize("document", DOCUMENTS, ids=short)
def test_every_link_leads_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []


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


WORDS_WITH_A_DASH = frozenset({"least-loaded", "round-robin", "kv-load", "common-configs", "nats-server"})
"""Values and names that look like an option in a table's first column and are none."""


@pytest.mark.parametrize("guide", [*GUIDES, REPOSITORY / "README.md"], ids=short)
def test_every_option_in_a_guide_exists(guide: Path) -> None:
    text = guide.read_text()
    flags = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)\b", text))
    of_services = {kebab(name) for name in re.findall(r"--[A-Z]\w+\.([a-z][\w-]+)", text)}
    in_tables = {
        kebab(name)
        for row in re.findall(r"^\| (`[^|]*) \|", text, re.M)
        for name in re.findall(r"`([a-z][a-z_-]*)`", row)
    }
    foreign = {"logdir", "endpoint"}  # of tensorboard and of circusctl
    assert (flags | of_services | in_tables) - known_options() - WORDS_WITH_A_DASH - foreign == set()


def variables_in(text: str) -> set[str]:
    found = set(re.findall(r"\b((?:DYN|DYNAMO|DYNAPLAN|ETCD|NATS)_[A-Z_]*[A-Z])\b", text))
    return {name for name in found if name not in ("ETCD_AUTH", "NATS_AUTH", "DYN_CIRCUS")}


def test_every_environment_variable_is_documented_and_every_documented_one_is_used() -> None:
    code = text_of(*MODULES)
    if 'f"DYN_CIRCUS_{name}_PORT"' in code:
        code += " DYN_CIRCUS_ENDPOINT_PORT DYN_CIRCUS_PUBSUB_PORT"
    for_users = text_of(*(document for document in DOCUMENTS if document.name != "CONTRIBUTING.md"))
    assert variables_in(for_users) == variables_in(code)


def test_the_changelog_and_the_readme_name_commands_that_exist() -> None:
    text = text_of(REPOSITORY / "CHANGELOG.md", REPOSITORY / "README.md", *GUIDES)
    used = set(re.findall(r"dynaplan ([a-z]+)\b", text))
    listed = re.search(r"^- `dynaplan planner`, (.*)\.$", text_of(REPOSITORY / "CHANGELOG.md"), re.M)
    assert listed, "the list of commands is missing"
    used |= set(re.findall(r"`(\w+)`", listed[1]))
    prose = {"runs", "is", "starts", "brings", "serves", "when", "does"}
    assert used - prose == set(COMMANDS) & used
    assert set(COMMANDS) <= used


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
