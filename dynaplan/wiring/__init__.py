"""The fuse box: the only room that names concrete adapters. Imports each one only when it is asked for."""

from dynaplan.config import certificates
from dynaplan.engines import registry as engines
from dynaplan.fleet import local_host as box
from dynaplan.planner import factory as planning
from dynaplan.store import connections

__all__ = ["box", "certificates", "connections", "engines", "planning"]
