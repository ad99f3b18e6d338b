"""Parse the command line; turn every UserError into one clear message and exit code 2."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from io import StringIO
from typing import Any

import click

from dynaplan import __version__
from dynaplan.process.signals import ended_by_sigint
from dynaplan.util import screen
from dynaplan.util.errors import DynaplanError, UserError, nearest

EXIT_INPUT, EXIT_INTERRUPTED = 2, 130
"""Exit codes: the input was wrong; the shell's for Ctrl-C."""

Table = Mapping[str, tuple[str, str]]
"""Each command in the order of the help page: its place, as ``LazyGroup`` has them, and its purpose."""

COMMAND_GROUPS: Mapping[str, Table] = {
    "Run": {
        "serve": ("serve", "Run a graph until Ctrl-C."),
        "stop": ("stop", "End the deployment in order."),
        "pull": ("pull", "Fetch a small model to serve."),
        "init": ("init", "Write a file of this box's models that starts."),
        "doctor": ("doctor", "Say what this box has and lacks."),
    },
    "Watch": {
        "status": ("status", "Show the workers and their load."),
        "top": ("top", "Show it live, with keys to scale, hold and drain."),
        "ui": ("ui", "Print the address of the web page that shows it."),
        "why": ("why", "Explain the last scaling decisions."),
        "recommend": ("recommend", "Say which engine option would keep more requests in time."),
        "logs": ("logs", "Print or follow the logs."),
        "gpus": ("gpus", "Show who has which GPU."),
    },
    "Change": {
        "scale": ("scale", "Set the number of workers by hand."),
        "run": ("run", "Run a program of yours on GPUs that the deployment lends."),
        "reserve": ("reserve:reserve", "Take GPUs from the deployment for a time."),
        "release": ("reserve:release", "End what `scale` holds and `reserve` keeps."),
        "restart": ("restart", "A new worker in the place of an old one, or of each."),
        "reload": ("reload", "Read the YAML again, and apply what has changed."),
        "upgrade": ("upgrade", "Have this version take over a running deployment."),
        "models": ("models:models", "Show the models that are loaded on request."),
        "load": ("models:load", "Load a model now."),
        "unload": ("models:unload", "Put a model away, after its requests."),
        "pin": ("models:pin", "Load a model, and keep it."),
        "unpin": ("models:unpin", "Let a pinned model leave again."),
        "keys": ("keys", "Keys of several people, their limits, and their usage."),
        "wake": ("wake", "Wake workers whose engines sleep."),
    },
    "Study": {
        "bench": ("bench", "Put load on it, and compare with the simulation."),
        "simulate": ("simulate", "Try policies on a trace, in virtual time."),
        "replay": ("replay", "Decide recorded intervals again, with other settings."),
        "profile-sla": ("profile_sla", "Measure an engine, recommend sizes and thresholds."),
        "profiles": ("profiles", "Show what was learnt of engines' steps, and export it."),
    },
    "Build upon": {
        "frontend": ("component_commands:frontend", "Run one frontend on its own."),
        "worker": ("component_commands:worker", "Run one engine worker on its own."),
        "planner": ("component_commands:planner", "Run the planner on its own."),
        "orchestrate": (
            "component_commands:orchestrate",
            "Carry out a planner's decisions by a command of yours.",
        ),
        "export": ("export", "Write what Kubernetes, Prometheus or Grafana needs of a deployment."),
        "compat": ("compat", "Run a program that imports Dynamo's modules."),
    },
}
"""The sections of the help page."""

COMMANDS: Table = {name: each for table in COMMAND_GROUPS.values() for name, each in table.items()}

HABITS = {
    "benchmark": "bench",
    "start": "serve",
    "up": "serve",
    "ps": "status",
    "ls": "status",
    "list": "status",
    "down": "stop",
    "kill": "stop",
    "rm": "stop",
    "remove": "stop",
    "delete": "stop",
    "quit": "stop",
    "watch": "top",
    "explain": "why",
    "download": "pull",
    "fetch": "pull",
    "unhold": "release",
}
"""Commands of other tools, and the one of dynaplan that does the same."""


OWN_PROCESS = "own process"
"""The ``obj`` of the root context where the command line is all that this process does: it may fork."""


class LazyGroup(click.Group):
    """A group by a table: each command in the order of the help page, with its module and its purpose.

    Modules are named below ``dynaplan.cli``; the command is called ``command`` there, or by the name behind a
    colon. ``habits`` are words that users of other tools type, and the command that does the same. With
    ``sections`` the help page has the table's commands in these.
    """

    def __init__(
        self,
        *arguments: Any,
        table: Table,
        habits: Mapping[str, str] | None = None,
        sections: Mapping[str, Table] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._table = table
        self._sections = sections or {"Commands": table}
        self._habits = habits or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module and return the command; None for an unknown name."""
        if cmd_name not in self._table:
            return None
        module, _, name = self._table[cmd_name][0].partition(":")
        with ended_by_sigint():
            command: click.Command = getattr(import_module(f"dynaplan.cli.{module}"), name or "command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their purposes, without importing any."""
        widest = max(map(len, self._table))
        for title, table in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), purpose) for name, (_, purpose) in table.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments begin with; an unknown one is answered with the nearest."""
        name = args[0]
        if name not in self._table and not name.startswith("-"):
            meant = self._habits.get(name.lower())
            hint = f"Did you mean {meant!r}?" if meant else nearest(name, self._table)
            raise click.UsageError(f"No such command {name!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.command(
    cls=LazyGroup,
    table=COMMANDS,
    habits=HABITS,
    sections=COMMAND_GROUPS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, "-v", "--version", prog_name="dynaplan")
@click.pass_context
def group(context: click.Context) -> None:
    """Serve and scale LLM inference graphs on one multi-GPU box."""
    context.color = screen.colours_wanted()


def _show(message: str) -> None:
    """Print errors, the first word of each coloured."""
    coloured = re.sub(r"^Error:", screen.error("Error:"), message, flags=re.MULTILINE)
    click.echo(coloured, err=True, color=screen.colours_wanted())


def _open_standard_streams() -> None:
    """Open /dev/null in the place of each standard stream that a parent has closed.

    Otherwise another file would get the descriptor, and then what is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _has_working_directory() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 the user's input was wrong, 1 any other error.

    130 is the shell's code for Ctrl-C. A caller that gives ``arguments`` goes on in this process: ``serve``
    gets no supervisor, which would take its place.
    """
    words = list(arguments or sys.argv[1:])
    owner = None if arguments else OWN_PROCESS
    _open_standard_streams()
    try:
        code = group.main(args=words, prog_name="dynaplan", standalone_mode=False, obj=owner)
    except DynaplanError as error:
        _show(f"Error: {error}")
        code = EXIT_INPUT if isinstance(error, UserError) else 1
    except click.ClickException as error:
        shown = StringIO()
        error.show(shown)
        _show(shown.getvalue().rstrip())
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
    except FileNotFoundError:
        if _has_working_directory():
            raise
        _show("Error: the working directory of this process is no longer there\n  Change to another one.")
        code = EXIT_INPUT
    sys.exit(code if isinstance(code, int) else 0)
