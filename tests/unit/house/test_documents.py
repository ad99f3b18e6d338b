"""Documents say what the code says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

from dynaplan.cli.main import COMMANDS, group
from dynaplan.config import stock
from dynaplan.config.settings.fields import kebab, options_of
from dynaplan.config.settings.keys import KeySettings
from dynaplan.config.settings.models import OnDemandSettings
from dynaplan.config.settings.worker import Resources, ServiceArgs
from dynaplan.graph.lifecycle import HOLDS_GPUS, LIFECYCLE
from tests.unit.house.source import (
    DOCUMENTS,
    GUIDES,
    MODULES,
    PACKAGE,
    REPOSITORY,
    TESTS,
    short,
    text_of,
    tree,
)


def test_the_architecture_tells_every_state_of_a_worker_its_moves_and_its_gpus() -> None:
    section = text_of(REPOSITORY / "docs/architecture.md").partition("## A worker's life")[2]
    rows = re.findall(r"^\| (\w+) \| [^|]* \| (yes|no) \| ([^|]*) \|$", section, re.M)
    told = {state: (holds == "yes", set(moves.split(", "))) for state, holds, moves in rows}
    assert told == {
        start.value: (start in HOLDS_GPUS, {end.value for end in ends.values()} or {"-"})
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


DECISIONS = REPOSITORY / "docs" / "decisions"


def test_every_decision_has_a_number_of_its_own_and_is_linked_from_the_index() -> None:
    pages = sorted(DECISIONS.glob("[0-9]*.md"))
    numbers = [page.name[:4] for page in pages]
    assert len(set(numbers)) == len(numbers) > 0
    assert [page.name for page in pages if not page.read_text().startswith(f"# {page.name[:4]}: ")] == []
    index = (DECISIONS / "README.md").read_text()
    assert [page.name for page in pages if f"({page.name})" not in index] == []


def test_a_decision_that_the_code_names_exists() -> None:
    numbers = {page.name[:4] for page in DECISIONS.glob("[0-9]*.md")}
    named = re.findall(r"docs/decisions/(\d{4})", text_of(*MODULES, REPOSITORY / "setup.cfg"))
    assert named
    assert set(named) - numbers == set()


def known_options() -> set[str]:
    """Every option that there is: of services, of the planner, of the commands."""
    of_services = {*stock.FRONTEND, *stock.PROCESSOR, *stock.ROUTER, *stock.PLANNER, *stock.WORKER}
    of_services |= {*options_of(ServiceArgs), *options_of(Resources), *options_of(OnDemandSettings)}
    of_services |= options_of(KeySettings).keys()
    of_engines = {own for each in stock.WORKER.values() for names in each.names.values() for own in names}
    commands = list(commands_of(group))
    of_commands = {
        name.lstrip("-")
        for command in commands
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    aliases = {name for command in commands for name in getattr(command, "aliases", {})}
    return of_services | of_engines | of_commands | aliases | {"help", "version"}


def commands_of(group: click.Group) -> Iterator[click.Command]:
    """The commands of the group, and those of the groups among them."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command, name
        yield command
        if isinstance(command, click.Group):
            yield from commands_of(command)


def test_every_option_in_a_guide_exists() -> None:
    named = {
        f"{short(guide)}: {name}"
        for guide in GUIDES
        for name in options_in(guide.read_text()) - known_options() - flags_of_the_engine(guide)
    }
    assert named == set()


def flags_of_the_engine(guide: Path) -> set[str]:
    """Flags that a guide of one engine may name: those in the modules of the engine's adapter."""
    engines = REPOSITORY / "dynaplan/engines"
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
        *(
            *("tensor-split", "main-gpu", "metrics", "slot-save-path", "logdir", "endpoint"),
            *("stream-interval", "no-deps", "extra-index-url", "no-kv-events"),
        ),
        *(
            flag.removeprefix("--")
            for file in (REPOSITORY / "tests" / "fixtures" / "engines").glob("*/flags.txt")
            for flag in file.read_text().split()
        ),
    }
)
"""TensorBoard's, circusctl's, pip's, the original's, and those of engines that dynaplan passes on."""


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
    used = [*MODULES, *(TESTS / "gpu").glob("*.py")]  # which a guide tells its readers to run
    assert variables_in(text_of(*DOCUMENTS)) == variables_in("\n".join(map(texts_in, used)))


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


def test_a_line_of_markdown_has_at_most_100_columns() -> None:
    long = [
        f"{short(document)}:{number}"
        for document in [*DOCUMENTS, *PACKAGE.rglob("*.md"), *TESTS.rglob("*.md")]
        for number, line in prose_of(document)
        if len(UNBREAKABLE.sub("", line)) > 100
    ]
    assert long == []


UNBREAKABLE = re.compile(r"\]\([^)]*\)|`[^`]*`")
"""The target of a link, and code: they cannot be broken over two lines."""


def prose_of(document: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a document without its tables, blocks of code and headings."""
    is_code = False
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.lstrip().startswith(("|", "#")) and not line.startswith("    "):
            yield number, line


WALKS = text_of(REPOSITORY / "docs/architecture.md").partition("## Six walks")[2].partition("\n## ")[0]
STATIONS = re.findall(r"^\| \d+ \| `([^`]+)` \| (.*) \|$", WALKS, re.M)


def test_the_stations_of_the_walks_through_the_code_exist() -> None:
    assert 20 <= len(STATIONS) <= 50, "a table that is not read finds nothing"
    assert [station for station, _ in STATIONS if not (PACKAGE / station).exists()] == []


def test_the_files_and_functions_that_a_station_names_exist() -> None:
    code = "\n".join(module.read_text() for module in MODULES)
    missing = [
        f"{station}: {name}"
        for station, told in STATIONS
        for name in re.findall(r"`([^`]+)`", told)
        if not (is_below(station, name) if name.endswith((".py", "/")) else is_defined(name, code))
    ]
    assert missing == []


def is_below(station: str, name: str) -> bool:
    """Tell whether the name is a path in the package, beside the station or in it."""
    folders = (PACKAGE, (PACKAGE / station).parent, PACKAGE / station)
    return any((folder / name).exists() for folder in folders)


def is_defined(name: str, code: str) -> bool:
    """Tell whether a class or function has this name; texts other than names are passed over."""
    last = name.partition("(")[0].rpartition(".")[2]
    is_name = re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", name) is not None and not last.isupper()
    return not is_name or re.search(rf"(def|class) {last}\b", code) is not None or last in OF_TEXTS


OF_TEXTS = {"sla", "jsonl", "Common"}
"""Words of the walks in quotes that name an option, a file's ending and a section."""
