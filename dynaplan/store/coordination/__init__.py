"""Coordination through the key-value store: watched prefixes, buckets, locks."""
