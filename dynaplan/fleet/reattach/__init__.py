"""A ``serve`` below a holder: its processes, and going on where the last one was."""
