"""Kubernetes manifests of a deployment, as plain data: with Dynamo's operator or without one."""
