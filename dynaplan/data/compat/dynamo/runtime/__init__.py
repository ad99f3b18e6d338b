"""Has ``dynamo.runtime.logging``, and nothing else."""
