"""Changing the number of workers by hand: counts, holds, and what the planner makes of them."""
