"""Where the planner's story goes: JSON lines that replay reads, and TensorBoard events."""
