"""The configuration of a service, under the original's name."""

from dynaplan.sdk import ServiceConfig

__all__ = ["ServiceConfig"]
