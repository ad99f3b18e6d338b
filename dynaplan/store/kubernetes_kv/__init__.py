"""The key-value store in a cluster's own API: ``DynamoWorkerMetadata``, one ConfigMap, and readiness."""
