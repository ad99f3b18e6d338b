"""The event plane on NATS."""
