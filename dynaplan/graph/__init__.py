"""A graph of services: its vocabulary (``@service``, ``depends``, ``.link``), loading and checking."""
