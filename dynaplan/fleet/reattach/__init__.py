"""A ``serve`` under a supervisor: its processes, and going on where the last one was."""
