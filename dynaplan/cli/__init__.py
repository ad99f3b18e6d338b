"""The command line: ``dynaplan serve``, and the commands that watch, scale, explain and stop a deployment."""

from dynaplan.cli.main import main

__all__ = ["main"]
