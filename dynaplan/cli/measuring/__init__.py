"""The commands that measure a running deployment."""
