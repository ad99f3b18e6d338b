"""What a profiling sweep measures, and what follows from it: choice, thresholds, tables, configuration."""
