"""Many models behind one address: which are loaded, which leave, and who waits for how long; pure."""
