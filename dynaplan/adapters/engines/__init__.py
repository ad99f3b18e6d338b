"""Adapters: engines."""
