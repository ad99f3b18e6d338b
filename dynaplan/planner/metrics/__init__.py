"""Sources of the planner's measurements: the load of workers, the traffic of frontends."""
