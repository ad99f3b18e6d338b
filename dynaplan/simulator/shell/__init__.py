"""What a simulation reads from the world: traces, profiles, a graph's file."""
