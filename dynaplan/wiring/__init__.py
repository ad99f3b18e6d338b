"""The fuse box: the only room that names concrete adapters. Imports each one only when it is asked for."""

from dynaplan.wiring import box, certificates, connections, engines, planning

__all__ = ["box", "certificates", "connections", "engines", "planning"]
