"""Request bodies: received within a budget of bytes, and read off the event loop when they are large.

``budget`` bounds the memory of all bodies together, ``receiving`` takes one body from a client within its
limits, ``reading`` makes a checked ``Call`` of it: in the event loop when it is small, else in a process of
its own (``process``, whose other side is ``process_main``).
"""
