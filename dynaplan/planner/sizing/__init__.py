"""Sizing the pools for TTFT and ITL targets: a queueing model, and the formulas of Dynamo's SLA planner."""
