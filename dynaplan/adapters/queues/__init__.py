"""Adapters: queues."""
