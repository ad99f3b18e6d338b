"""Files, clients and programs as other people have them, served as they stand."""
