"""The other end of the virtual connector: decisions of a planner, carried out by a program of the user's."""
