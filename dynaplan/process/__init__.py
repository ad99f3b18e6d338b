"""Child processes of ours: their environment, and their end."""
