"""How often the planner polls, how long it waits and how soon it tries again; all in seconds."""

from __future__ import annotations

READY_POLL_S = 0.5
"""Between two polls of the fleet before planning begins."""

FIRST_WAITING_LOG_S = 1.0
"""Until the log says that the planner waits for its store or cluster."""

WAITING_LOG_S = 30.0
"""Between two log lines that say what planning waits for."""

WORKER_TIMEOUT_S = 1.0
"""A worker's answer to ``GET /load_metrics``."""

FRONTEND_TIMEOUT_S = 1.0
"""A frontend's answer to ``GET /metrics``."""

QUEUE_TIMEOUT_S = 1.0
"""The answer with the depth of the prefill queue."""

PROMETHEUS_TIMEOUT_S = 5.0
"""The answer of a Prometheus server."""

LIBRARY_LOAD_S = 120.0
"""Until a forecasting library is loaded: a few seconds on a free machine, a minute on a loaded one."""

BACKTEST_DEADLINE_S = 240.0
"""Until a backtest is given up: less than the time to the next one."""

DECISION_POLL_S = 1.0
"""Between two polls of whether a decision is carried out."""

DECISION_DEADLINE_S = 1800.0
"""Until a decision is carried out, or a deployment is ready."""

LOST_HOLDS_S = 120.0
"""Since holds were last read: a missing key after that means that there are none."""

EXECUTOR_POLL_S = 2.0
"""Between two passes of a cluster's executor while a decision is carried out, or after an error."""

EXECUTOR_IDLE_POLL_S = 30.0
"""Between two polls of whether another writer's decision was left unfinished in a cluster."""

FIRST_RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""Pauses after a user's command that failed: it is run again, for the newest decision."""

COMMAND_STOP_S = 10.0
"""Until a user's command is killed after SIGTERM."""
