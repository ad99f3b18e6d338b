"""Options of a configuration: their tables, YAML files, overrides, and what they are merged to."""
