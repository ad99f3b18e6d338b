"""Where the planner reads the load of workers."""
