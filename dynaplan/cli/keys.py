"""``dynaplan keys add NAME | list | revoke NAME | usage``: the keys of several people, and what they used."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import click

from dynaplan.cli.main import LazyGroup
from dynaplan.cli.options import json_option, namespace_option
from dynaplan.cli.running_deployment import service_config
from dynaplan.config.keys import (
    NAME,
    expires_unix_s,
    hash_of,
    new_key,
    parse_keys,
    read_keys_file,
    with_entry,
    without_entry,
)
from dynaplan.config.service_config import section_options
from dynaplan.config.settings.fields import Option, options_of
from dynaplan.config.settings.keys import KeySettings
from dynaplan.fleet.runtime_dir import write_private
from dynaplan.gateway.keys.usage import COLUMNS, USAGE_DIRECTORY, Usage, add_up, read_usage
from dynaplan.util import screen
from dynaplan.util.errors import ConfigError, DeploymentError, nearest
from dynaplan.util.tables import text_table

MOST_DAYS = 3660
"""Days of usage that are looked for at most."""

ACTIONS = {
    "add": ("keys:add", "Make a key, print it once, and write its hash."),
    "list": ("keys:listing", "Show whose keys there are, and their limits."),
    "revoke": ("keys:revoke", "Let a key's holder in no longer."),
    "usage": ("keys:usage", "Show requests and tokens by key and model."),
}

DEFAULT_FILE = "keys.yaml"

GIVEN = {name: each for name, each in options_of(KeySettings).items() if name != "hash"}
"""The options of a key that a person decides on."""


@click.command(cls=LazyGroup, table=ACTIONS, name="keys")
def command() -> None:
    """Keys of several people: `dynaplan serve --api-keys keys.yaml` asks for one of them.

    A change holds within two seconds; nothing is started again.
    """


file_option = click.option(
    "--api-keys",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"The file; default: the one of the deployment that runs, else {DEFAULT_FILE}.",
)


def key_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a key, as the file has them."""
    for name, each in reversed(GIVEN.items()):
        command = click.option(
            f"--{name}", type=_type_of(each), is_flag=each.kind is bool or None, help=each.help
        )(command)
    return command


def _type_of(option: Option) -> click.ParamType[Any] | None:
    if option.choices:
        return click.Choice(option.choices)
    return click.INT if option.kind is int else None if option.kind is bool else click.STRING


@click.command(name="add")
@click.argument("name")
@key_options
@file_option
def add(name: str, file: Path | None, **given: Any) -> None:
    """Make a key for NAME, and print it: nobody can print it again. The file gets its hash.

    The file is made where there is none. An entry may be edited by hand.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name of a key", hint="Expected letters, digits, and . _ @ - behind the first."
        )
    path, key = _file(file), new_key()
    said = {
        name.replace("_", "-"): value
        for name, value in given.items()
        if value is not None and value is not False
    }
    settings = replace(KeySettings.from_options({**said, "hash": hash_of(key)}), name=name)
    expires_unix_s(settings)
    with _changed(path) as text:
        if name in {each.name for each in parse_keys(text[0], str(path)).values()}:
            raise ConfigError(
                f"{path} has a key of {name} already", hint=f"`dynaplan keys revoke {name}` ends that one."
            )
        text[0] = with_entry(text[0], settings)
    click.echo(f"The key of {name}, which is shown only now; {path} has its hash:", err=True)
    click.echo(key)


@click.command(name="list")
@file_option
@json_option
def listing(file: Path | None, as_json: bool) -> None:
    """Show whose keys there are, and the limits of each."""
    keys = read_keys_file(_file(file)).values()
    if as_json:
        shown = [{"name": each.name, **each.to_options()} for each in keys]
        click.echo(json.dumps([{k: v for k, v in each.items() if k != "hash"} for each in shown]))
        return
    rows = [["name", *GIVEN], *([each.name, *_cells(each)] for each in keys)]
    click.echo(text_table(rows, width=screen.width()))


def _cells(key: KeySettings) -> Iterator[str]:
    """Yield a key's options as a person reads them; "-" where there is no limit."""
    options = key.to_options()
    for name in GIVEN:
        value = options.get(name)
        text = ", ".join(value) if isinstance(value, list) else str(value)
        if name == "expires" and expires_unix_s(key) <= time.time():
            text += " (is over)"
        yield {None: "-", False: "no", True: "yes"}.get(value, text) if not isinstance(value, list) else text


@click.command(name="revoke")
@click.argument("name")
@file_option
def revoke(name: str, file: Path | None) -> None:
    """Take the key of NAME out of the file: it lets nobody in any more. What it has begun ends in peace."""
    path = _file(file)
    with _changed(path) as text:
        names = {each.name for each in parse_keys(text[0], str(path)).values()}
        if name not in names:
            hint = nearest(name, names) or "It has none at all; --api-keys FILE names another."
            raise ConfigError(f"{path} has no key of {name}", hint=hint)
        text[0] = without_entry(text[0], name)
    click.echo(f"The key of {name} is revoked.")


@click.command(name="usage")
@click.argument("name", required=False)
@namespace_option
@click.option(
    "--days", type=click.IntRange(1, MOST_DAYS), default=1, show_default=True, help="So many, today the last."
)
@click.option("--csv", "as_csv", is_flag=True, help="A line for each day, key and model.")
def usage(name: str | None, namespace: str | None, days: int, as_csv: bool) -> None:
    """Show what the keys, or that of NAME, had computed: requests and tokens by model."""
    from dynaplan.fleet.deployments import find_deployment

    directory = find_deployment(namespace).log_dir / USAGE_DIRECTORY
    by_day: dict[date, Usage] = {}
    for ago in reversed(range(days)):
        day = date.today() - timedelta(days=ago)
        if (file := directory / f"{day}.csv").exists():
            found = read_usage(file)
            by_day[day] = {names: each for names, each in found.items() if name in (None, names[0])}
    if as_csv:
        text = io.StringIO()
        rows = [[day, *names, *each] for day, own in by_day.items() for names, each in own.items()]
        csv.writer(text, lineterminator="\n").writerows([["day", *COLUMNS], *rows])
        click.echo(text.getvalue(), nl=False)
        return
    total = add_up(*(each.items() for each in by_day.values()))
    heads = [each.replace("_", " ") for each in COLUMNS]
    table = [heads, *([*names, *map(str, amounts)] for names, amounts in sorted(total.items()))]
    click.echo(text_table(table, width=screen.width()))


def _file(given: Path | None) -> Path:
    """Return the file of keys: the given one, that of the only running deployment, or ``DEFAULT_FILE``."""
    if given:
        return given
    from dynaplan.fleet.deployments import find_deployment

    try:
        config = service_config(find_deployment())
    except DeploymentError:
        return Path(DEFAULT_FILE)
    return Path(section_options(config, "Frontend").get("api-keys") or DEFAULT_FILE)


@contextmanager
def _changed(path: Path) -> Iterator[list[str]]:
    """Yield a list of one item, the file's text; the item is written back atomically with mode 0600.

    The directory is locked meanwhile, so that two commands wait for each other. Raises ConfigError when the
    file cannot be read or written, or its keys are wrong.
    """

    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="Expected a file in a directory.") from None
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        if path.exists():
            read_keys_file(path)  # what is wrong, and who else may read it
        text = [path.read_text() if path.exists() else ""]
        yield text
        parse_keys(text[0], str(path))
        write_private(path, text[0])
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        os.close(directory)
