"""Upkeep: what ``serve`` looks after once a second beside its arbiter."""
