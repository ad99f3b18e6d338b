"""Keys, watches and leases: etcd through its JSON gateway, NATS, and a twin in memory."""
