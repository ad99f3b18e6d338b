"""Studies: simulating a deployment, replaying its decisions, measuring and profiling it."""
