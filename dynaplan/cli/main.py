"""Parse the command line; turn every UserError into one clear message and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import StringIO

import click

from dynaplan import __version__
from dynaplan.cli.lazy_group import OWN_PROCESS, LazyGroup
from dynaplan.util import screen
from dynaplan.util.errors import DynaplanError, UserError

COMMANDS = {
    "serve": ("starting.serve", "Run a graph until Ctrl-C."),
    "frontend": ("components.frontend", "Run one frontend on its own."),
    "worker": ("components.worker", "Run one engine worker on its own."),
    "planner": ("components.planner", "Run the planner on its own."),
    "orchestrate": ("components.orchestrate", "Carry out a planner's decisions by a command of yours."),
    "status": ("watching.status", "Show the workers and their load."),
    "top": ("watching.top", "Show it live, with keys to scale, hold and drain."),
    "ui": ("ui.address", "Print the address of the web page that shows it."),
    "scale": ("scaling.scale", "Set the number of workers by hand."),
    "release": ("scaling.release", "End what `scale` holds and `reserve` keeps."),
    "reserve": ("scaling.reserve", "Take GPUs from the deployment for a time."),
    "restart": ("scaling.restart", "A new worker in the place of an old one, or of each."),
    "reload": ("scaling.reload", "Read the YAML again, and apply what has changed."),
    "upgrade": ("starting.upgrade", "Have this version take over a running deployment."),
    "wake": ("scaling.wake", "Wake workers whose engines sleep."),
    "why": ("watching.why", "Explain the last scaling decisions."),
    "logs": ("watching.logs", "Print or follow the logs."),
    "stop": ("stop", "End the deployment in order."),
    "bench": ("bench.command", "Put load on it, and compare with the simulation."),
    "simulate": ("simulate", "Try policies on a trace, in virtual time."),
    "replay": ("replay", "Decide recorded intervals again, with other settings."),
    "profile-sla": ("profile_sla", "Measure an engine, recommend sizes and thresholds."),
    "export": ("export", "Write what Kubernetes, Prometheus or Grafana needs of a deployment."),
    "doctor": ("box.doctor", "Say what this box has and lacks."),
    "report": ("box.report", "Write one masked file for a bug report."),
    "pull": ("pull", "Fetch a small model to serve."),
    "compat": ("compat", "Run a program that imports Dynamo's modules."),
}
"""Each command in the order of the help page: the module that has it as ``command``, and its purpose."""

HABITS = {
    "load": "bench",
    "benchmark": "bench",
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


@click.command(
    cls=LazyGroup, table=COMMANDS, habits=HABITS, context_settings={"help_option_names": ["-h", "--help"]}
)
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

    130 and 141 are the shell's codes for Ctrl-C and for a reader of the output that went away. A caller that
    gives ``arguments`` goes on in this process: ``serve`` gets no holder, which would take its place.
    """
    words = list(arguments or sys.argv[1:])
    owner = None if arguments else OWN_PROCESS
    try:
        code = group.main(args=words, prog_name="dynaplan", standalone_mode=False, obj=owner)
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
