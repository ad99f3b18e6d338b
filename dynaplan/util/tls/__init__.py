"""TLS by PEM files: of servers, of clients, and the faults of the files."""
