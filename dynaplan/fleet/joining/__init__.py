"""The door for programs: a process of any kind becomes part of a deployment."""

from dynaplan.fleet.joining.connecting import connect

__all__ = ["connect"]
