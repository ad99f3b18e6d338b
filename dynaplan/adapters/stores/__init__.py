"""Adapters: stores."""
