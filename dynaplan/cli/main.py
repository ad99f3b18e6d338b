"""Parse the command line; turn every UserError into one clear message and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from io import StringIO

import click

from dynaplan import __version__
from dynaplan.domain.errors import DynaplanError, UserError, nearest
from dynaplan.foundation import screen

COMMANDS = {
    "serve": ("starting.serve", "Run a graph until Ctrl-C."),
    "frontend": ("components.frontend", "Run one frontend on its own."),
    "worker": ("components.worker", "Run one engine worker on its own."),
    "planner": ("components.planner", "Run the planner on its own."),
    "orchestrate": ("components.orchestrate", "Carry out a planner's decisions by a command of yours."),
    "status": ("watching.status", "Show the workers and their load."),
    "top": ("watching.top", "Show it live, with keys to scale, hold and drain."),
    "scale": ("scaling.scale", "Set the number of workers by hand."),
    "release": ("scaling.release", "End what `scale` holds."),
    "restart": ("scaling.restart", "A new worker in the place of an old one, or of each."),
    "wake": ("scaling.wake", "Wake workers whose engines sleep."),
    "why": ("watching.why", "Explain the last scaling decisions."),
    "logs": ("watching.logs", "Print or follow the logs."),
    "stop": ("stop", "End the deployment in order."),
    "simulate": ("simulate", "Try policies on a trace, in virtual time."),
    "replay": ("replay", "Decide recorded intervals again, with other settings."),
    "profile-sla": ("profile_sla", "Measure an engine, recommend sizes and thresholds."),
    "export": ("exporting.export", "Write the manifests that run a deployment on Kubernetes."),
    "pull": ("pull", "Fetch a small model to serve."),
    "compat": ("compat", "Run a program of the original's API."),
}
"""Each command in the order of the help page: the module that has it as ``command``, and its purpose."""

HABITS = {
    "run": "serve",
    "start": "serve",
    "up": "serve",
    "ps": "status",
    "ls": "status",
    "list": "status",
    "down": "stop",
    "kill": "stop",
    "explain": "why",
    "download": "pull",
    "fetch": "pull",
    "unhold": "release",
}
"""Commands of other tools, and the one of dynaplan that does the same."""


class LazyGroup(click.Group):
    """A group whose commands are imported on use, so that each starts fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module and return its ``command``."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"dynaplan.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their purposes, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, purpose) for name, (_, purpose) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments begin with; an unknown one is answered with the nearest."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            meant = HABITS.get(name.lower())
            hint = f"Did you mean {meant!r}?" if meant else nearest(name, COMMANDS)
            raise click.UsageError(f"No such command {name!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-v", "--version", prog_name="dynaplan")
@click.pass_context
def group(context: click.Context) -> None:
    """Serve and scale LLM inference graphs on one multi-GPU box."""
    context.color = screen.colours_wanted()


def _show(message: str) -> None:
    """Print an error, its first word coloured."""
    before, word, rest = message.partition("Error:")
    click.echo(f"{before}{screen.error(word)}{rest}", err=True, color=screen.colours_wanted())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 the user's input was wrong, 1 any other error.

    130 and 141 are the shell's codes for Ctrl-C and for a reader of the output that went away.
    """
    try:
        code = group.main(args=list(arguments or sys.argv[1:]), prog_name="dynaplan", standalone_mode=False)
    except DynaplanError as error:
        _show(f"Error: {error}")
        code = 2 if isinstance(error, UserError) else 1
    except click.ClickException as error:
        shown = StringIO()
        error.show(shown)
        _show(shown.getvalue().rstrip())
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except BrokenPipeError:
        sys.stderr.close()
        code = 141
    sys.exit(code if isinstance(code, int) else 0)
