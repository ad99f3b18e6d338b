"""Forecasters: own methods, computed at once, or a library in a process of its own; their history."""
