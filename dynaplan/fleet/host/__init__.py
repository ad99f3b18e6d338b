"""Adapters to the local machine: GPUs and claims on them, processes, ports, and the statefile on disk."""
