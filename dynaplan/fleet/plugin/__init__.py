"""The fleet plugin: keeps the workers there are equal to the workers that are wanted."""

import sys

PROGRAM = (sys.executable, "-P", "-m", "dynaplan.fleet.plugin")
"""The beginning of its process's command line; circus' own options follow."""
