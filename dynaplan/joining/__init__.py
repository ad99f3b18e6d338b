"""The door for programs: a process of any kind becomes part of a deployment."""
