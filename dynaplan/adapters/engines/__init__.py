"""The inference engines behind ``dynaplan.ports.engines.Engine``."""
