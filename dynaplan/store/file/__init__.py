"""The key-value store and its leases in a directory: for one machine and one user, without a server."""
