"""The heartbeat: observe, decide, act."""
