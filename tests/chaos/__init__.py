"""Faults drawn from a seed, and a checker of what came of them: on virtual time, and over a deployment."""
