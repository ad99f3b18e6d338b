"""Wire forms: registrations, load, prefills, heartbeats, and the keys and documents of the store."""
