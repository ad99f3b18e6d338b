"""Parts that the engines share: a server as a child process, its metrics, its model's files."""
