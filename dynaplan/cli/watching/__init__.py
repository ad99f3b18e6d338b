"""Commands that only read: the state of a deployment, its logs, its planner's reasons."""
