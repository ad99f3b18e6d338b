"""Measures an engine and recommends: sweeps over a running deployment, and what comes of them."""
