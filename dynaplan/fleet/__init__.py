"""Graph to watchers: the arbiter, the fleet plugin and the bootstrap of a child process."""
