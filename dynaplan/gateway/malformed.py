"""Malformed HTTP in the frontend's log: one line for each, not a traceback that fills the disk."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError

_CLIENT_FAULTS = (HttpProcessingError, RequestPayloadError)


class _OneLine(logging.Filter):
    """Reduces the record of a client's fault to one line; leaves records of our own faults whole."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, _CLIENT_FAULTS):
            record.msg = f"{record.getMessage()}: {' '.join(str(error).split())}"
            record.args, record.exc_info, record.exc_text = (), None, None
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        return True


def http_logger() -> logging.Logger:
    """The logger of an HTTP server that anonymous clients may speak to."""
    logger = logging.getLogger("dynaplan.http")
    if not logger.filters:
        logger.addFilter(_OneLine())
    return logger
