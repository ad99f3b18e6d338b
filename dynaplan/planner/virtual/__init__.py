"""The virtual connector: decisions as keys of a store, and its other end, for a program of the user's."""
