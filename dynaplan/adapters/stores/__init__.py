"""Keys, watches and leases: etcd through its JSON gateway, and its twin in memory."""
