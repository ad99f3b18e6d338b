"""A worker process's main: from its command line to its drain."""
