"""Forecasters: the core's own methods, computed at once, or a library in a process of its own."""
