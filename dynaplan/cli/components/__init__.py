"""Single components: a frontend, a worker or a planner in the foreground of a terminal."""
