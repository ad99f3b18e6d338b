"""Profiles: the measurements of an engine, and their tables."""
