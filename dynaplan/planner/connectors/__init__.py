"""Connectors: they carry the planner's decisions to the systems that start and stop workers."""
