"""Work queues and messages: NATS JetStream, and a twin in memory."""
