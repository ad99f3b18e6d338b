"""The inference engines behind ``dynaplan.ports.Engine``; so far the simulated one."""
