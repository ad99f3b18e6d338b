"""Kubernetes: a client of its API, which the connector and discovery share."""
