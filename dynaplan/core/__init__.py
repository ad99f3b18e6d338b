"""Pure decisions. No I/O, no clock, no logging, no randomness, no environment: time and data are arguments."""
