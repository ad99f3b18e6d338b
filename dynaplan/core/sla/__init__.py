"""Sizing the pools for TTFT and ITL targets: the formulas of Dynamo's SLA planner, and a queueing model."""
