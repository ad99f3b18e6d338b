"""Recorders of decisions: JSON lines that replay reads, TensorBoard curves, and gauges for ``/metrics``."""
