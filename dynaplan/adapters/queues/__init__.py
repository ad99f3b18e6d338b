"""Messages and work queues: NATS with JetStream, and its twin in memory."""
