"""Routing: the worker that gets a request, the router's book, and the place of a prompt's prefill."""
