"""Observe, decide, act: the planner of a deployment, as a service of its graph or on its own."""
