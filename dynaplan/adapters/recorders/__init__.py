"""Adapters: recorders."""
