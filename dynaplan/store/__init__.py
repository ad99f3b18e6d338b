"""Keys, watches and leases: in etcd, in NATS, in a directory, in a cluster's API, and in memory."""
