"""`dynaplan serve`, and what it checks before anything starts."""
