"""This machine: its GPUs and who claims them, its processes, and the statefile on its disk."""
