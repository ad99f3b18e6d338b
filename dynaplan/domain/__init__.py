"""The vocabulary: frozen types, lifecycle tables, settings and errors. Imports only the standard library."""
