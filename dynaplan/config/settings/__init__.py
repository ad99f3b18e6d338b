"""Options of every section of a configuration: frozen dataclasses, one field for each option."""
