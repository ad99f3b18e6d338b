"""A file that shows a Prometheus server where the deployment's metrics are, whatever its port.

It is a ``file_sd_configs`` file, whose path stays the same from one ``serve`` to the next: the scrape
configuration names the path once.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from dynaplan.http.routes import ALL_METRICS_PATH

TARGETS_FILE = "prometheus.json"
"""The file's name, in the directory of the logs."""

log = logging.getLogger(__name__)


@contextmanager
def prometheus_targets(log_dir: Path, url: str) -> Iterator[None]:
    """Have the file name the frontends at that URL inside a ``with`` block, and nobody afterwards.

    A file that cannot be written costs Prometheus its targets, and the deployment nothing.
    """
    parts = urlsplit(url)
    labels = {"__scheme__": parts.scheme, "__metrics_path__": ALL_METRICS_PATH}
    _write(log_dir / TARGETS_FILE, [{"targets": [parts.netloc], "labels": labels}])
    try:
        yield
    finally:
        _write(log_dir / TARGETS_FILE, [])


def _write(path: Path, targets: list[dict[str, object]]) -> None:
    """Replace the file as a whole: Prometheus reads it at any moment."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.touch(mode=0o600)  # a Prometheus that reads it runs as this user, as whatever reads the logs
        draft.write_text(json.dumps(targets, indent=2) + "\n")
        draft.replace(path)
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror)
