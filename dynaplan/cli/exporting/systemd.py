"""``dynaplan export systemd``: the unit that runs a deployment at boot, as systemd.service(5) has it."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from dynaplan.domain.errors import ConfigError
from dynaplan.domain.lifecycle import EXIT_NEVER

WATCHDOG_S = 60
"""Seconds without a sign of life after which systemd replaces ``serve``; it gives one every second."""

ENDING_S = 15
"""Seconds that ``serve`` needs after its drain deadline: to kill what is left, and to clean up."""

KEPT = re.compile(r"(DYN|DYNAMO|DYNAPLAN|ETCD|NATS|CUDA_VISIBLE|HF_HOME)[A-Z_]*")
"""The variables of this shell that go into the unit, but for secrets: they say how a deployment is made."""

NEVER_WRITTEN = ("DYNAPLAN_RUNTIME_DIR", "DYNAPLAN_PARENT_PID")


@click.command(
    name="systemd",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
    epilog="Every option of `dynaplan serve` goes into the unit: -f, --port, --Service.key=value ...",
)
@click.option(
    "--system", "is_system", is_flag=True, help="A unit of the system, not of the user: /etc/systemd/system."
)
@click.option("--user", help="With --system: the user as which it runs.  [default: this one]")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File; else it is printed."
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="GRAPH [OPTION OF SERVE]...")
def command(is_system: bool, user: str | None, output: Path | None, arguments: Sequence[str]) -> None:
    """Write a systemd unit for `dynaplan serve GRAPH ...`, to be run from this directory.

    It is ready when `serve` is, is watched, restarted after a failure, and gets the time to drain.
    """
    from dynaplan.cli.exporting.writing import write_text

    if user and not is_system:
        raise ConfigError(f"--user {user} is for --system", hint="A unit of the user runs as the user.")
    context = _serve_context(arguments)
    name = context.params["namespace"] or "dynamo"
    lines = unit_lines(arguments, context.params, Path.cwd(), is_system=is_system, user=user or _login())
    write_text("\n".join([*_how(name, is_system=is_system), *lines]) + "\n", output)


def _serve_context(arguments: Sequence[str]) -> click.Context:
    """Return the arguments as ``serve`` parses them; raises what it would raise."""
    from dynaplan.cli.starting.serve import command as serve

    context = serve.make_context("serve", list(arguments))
    for name in ("detach", "dry_run"):
        if context.params[name]:
            raise ConfigError(f"--{name.replace('_', '-')} is nothing for a unit", hint="Leave it out.")
    if any(each == "--api-key" or each.startswith("--api-key=") for each in arguments):
        raise ConfigError(
            "--api-key would stand in the unit, which everybody can read",
            hint="Leave it out, and write DYNAPLAN_API_KEY=... into the EnvironmentFile of the unit.",
        )
    return context


def unit_lines(
    arguments: Sequence[str], params: dict[str, Any], directory: Path, *, is_system: bool, user: str
) -> Iterator[str]:
    """Yield the lines of the unit; ``params`` are the options of ``serve`` in ``arguments``."""
    name = params["namespace"] or "dynamo"
    own = [each for each in arguments if each != "--exit-on-failure"]
    words = [sys.executable, "-P", "-m", "dynaplan", "serve", *own, "--exit-on-failure"]
    yield from ("[Unit]", f"Description=dynaplan deployment {_literal(name)}")
    if is_system:
        yield from ("Wants=network-online.target", "After=network-online.target nvidia-persistenced.service")
    is_held = params["supervise"] and params["orphan_grace"]  # the main process is the holder, serve tells
    yield from ("", "[Service]", "Type=notify", f"NotifyAccess={'all' if is_held else 'main'}")
    yield from ([f"User={user}"] if is_system else [])
    yield f"WorkingDirectory={_literal(str(directory))}"
    yield from (f"Environment={_quoted(each)}" for each in _variables())
    place = f"/etc/dynaplan/{name}.env" if is_system else f"%h/.config/dynaplan/{name}.env"
    yield from ("# Secrets, such as DYNAPLAN_API_KEY=..., go into this file (mode 0600).",)
    yield f"EnvironmentFile=-{place}"
    yield f"ExecStart={' '.join(map(_word, words))}"
    yield from ("# Loading a model takes its time; a worker that can never start ends it with 78.",)
    yield "TimeoutStartSec=infinity"
    yield f"TimeoutStopSec={math.ceil(params['drain_timeout_s']) + ENDING_S}"
    yield from ("KillMode=mixed", f"WatchdogSec={WATCHDOG_S}", "Restart=on-failure", "RestartSec=5")
    yield f"RestartPreventExitStatus=2 {EXIT_NEVER}"
    yield from ("# A worker that the kernel kills for its memory is replaced; the others go on.",)
    yield from ("OOMPolicy=continue", "LimitNOFILE=1048576", "TasksMax=infinity")
    yield from ("", "[Install]", f"WantedBy={'multi-user' if is_system else 'default'}.target")


def _how(name: str, *, is_system: bool) -> Iterator[str]:
    """Yield comments that say where the unit goes and how it is started."""
    unit = f"dynaplan-{name}.service"
    if is_system:
        yield f"# /etc/systemd/system/{unit}; then:"
        yield f"#   systemctl daemon-reload && systemctl enable --now {unit}"
    else:
        yield f"# ~/.config/systemd/user/{unit}; then:"
        yield f"#   systemctl --user daemon-reload && systemctl --user enable --now {unit}"
        yield "#   loginctl enable-linger   (so that it runs without a login)"


def _variables() -> Iterator[str]:
    from dynaplan.domain.masking import looks_secret

    for name, value in sorted(os.environ.items()):
        if KEPT.fullmatch(name) and not looks_secret(name) and name not in NEVER_WRITTEN:
            yield f"{name}={value}"


def _login() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _literal(text: str) -> str:
    """Return a text without specifiers, such as ``%h``, for systemd; ConfigError if it has several lines."""
    if not text.isprintable():
        raise ConfigError(f"{text!r} cannot stand in a unit", hint="Expected text of one line.")
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """Return one word as systemd.syntax(7) reads it back."""
    escaped = _literal(text).replace("\\", "\\\\").replace('"', '\\"')
    return escaped if re.fullmatch(r"[\w@%+=:,./-]+", text) else f'"{escaped}"'


def _word(text: str) -> str:
    """Return one word of a command: there a variable would be put in for ``$``."""
    return _quoted(text).replace("$", "$$")
