"""The fleet plugin: keeps the workers there are equal to the workers that are wanted."""
