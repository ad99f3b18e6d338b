"""Measured profiles made ready for the SLA planner's formulas, with a numerical library."""
