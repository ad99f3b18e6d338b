"""Pure decisions. No I/O, clock, logging, randomness or environment: time and data are arguments."""
