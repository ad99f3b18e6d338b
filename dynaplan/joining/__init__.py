"""The door for programs: a process of any kind becomes part of a deployment."""

from dynaplan.joining.connecting import connect
from dynaplan.joining.original import dynamo_worker

__all__ = ["connect", "dynamo_worker"]
