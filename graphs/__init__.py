"""The stock graphs, each with a YAML beside it: ``dynaplan serve graphs.disagg:Frontend -f disagg.yaml``."""
