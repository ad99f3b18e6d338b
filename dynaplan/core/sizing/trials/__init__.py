"""Standing still and following, tried on what came."""
