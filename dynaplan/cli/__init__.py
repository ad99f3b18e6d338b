"""The front door: ``dynaplan serve`` and the commands that look at, steer and stop what it runs."""

from dynaplan.cli.main import main

__all__ = ["main"]
