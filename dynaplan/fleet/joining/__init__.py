"""The door for programs: a process of any kind becomes part of a deployment."""

from dynaplan.fleet.joining.connecting import connect
from dynaplan.fleet.joining.dynamo_worker import dynamo_worker

__all__ = ["connect", "dynamo_worker"]
