"""The words of a scaling decision: what is observed, what is decided, how many workers are wanted."""
