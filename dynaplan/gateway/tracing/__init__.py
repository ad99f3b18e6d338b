"""Adapters of the port to what collects the traces of requests."""
