"""The web page's side of the command line: its address, and the process that looks for it."""
