"""Graph to watchers: the arbiter, the fleet plugin and the bootstrap of a child process."""

import sys

WORKER_PROGRAM = (sys.executable, "-m", "dynaplan.worker.main")
"""The beginning of every worker's command line."""

PLUGIN_PROGRAM = (sys.executable, "-P", "-m", "dynaplan.fleet.plugin")
"""The beginning of the fleet plugin's command line; circus' own options follow."""
