"""The event plane over NATS, over ZMQ without a broker, and in memory."""
