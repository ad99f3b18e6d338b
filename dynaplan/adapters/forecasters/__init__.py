"""Who computes forecasts: the core in this process, or a library in a process of its own."""
