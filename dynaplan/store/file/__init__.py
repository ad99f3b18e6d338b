"""The key-value store and its leases in a directory: for one machine and one user, without a server.

The log (``.dynaplan/journal/log``) is the store: one line for each change, in the order in which they
happened. The key files, which people and readers of the original's layout look at, are drawn after it.
"""
