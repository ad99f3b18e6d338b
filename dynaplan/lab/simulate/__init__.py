"""Simulations as a web page with charts."""
