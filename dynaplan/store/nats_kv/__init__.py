"""The key-value store and its leases in one bucket of JetStream."""
