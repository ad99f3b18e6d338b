"""Deployments and simulations from Python: ``dynaplan.serve`` and ``dynaplan.simulate``."""
