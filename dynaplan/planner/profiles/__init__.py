"""Measured profiles, found by their names and prepared as the model that the SLA policy sizes with."""
