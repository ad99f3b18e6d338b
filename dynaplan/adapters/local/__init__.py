"""Adapters: local."""
