"""The workers of a deployment: what is there, what to start and to drain, on which GPUs and the statefile."""
