"""The inference engines behind ``dynaplan.engines.port.Engine``."""
