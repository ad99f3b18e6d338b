"""The load of a measurement: its generators, the streams they read, and the times they find."""
