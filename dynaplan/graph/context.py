"""Facts about the running process, for the code of a service."""

from __future__ import annotations

from typing import Any

dynamo_context: dict[str, Any] = {}
"""Filled before a service is made: ``service_name``, ``namespace``, ``worker_id`` (text), ``runtime``,
``runner_map``, ``component``, ``endpoints``. Empty in a unit test."""
