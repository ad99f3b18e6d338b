"""KV events: blocks that an engine stores and removes, as engines publish them and as they travel."""
