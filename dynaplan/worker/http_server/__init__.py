"""The public port: how its connections are accepted, and the limits that each of them has."""
