"""Messages and the work queue on NATS."""
