"""The original's set-up of logging."""

from typing import Any

from dynaplan.process.logfile import configure_logging


def configure_dynamo_logging(*_ignored: Any, **_named: Any) -> None:
    """Log to standard error, in dynaplan's format; the original's arguments are ignored."""
    configure_logging()
