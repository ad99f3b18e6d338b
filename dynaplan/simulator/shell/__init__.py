"""The inputs of a simulation, read from the world: traces, profiles, a graph's file."""
