"""Membership: a process's part in a deployment, whether or not it runs a graph."""
