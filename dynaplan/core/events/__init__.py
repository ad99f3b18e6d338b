"""Events on their way: the forms of messages, what a subscriber misses, what a publisher keeps."""
