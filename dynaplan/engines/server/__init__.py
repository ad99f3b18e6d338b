"""Engines that run as a server of their own: the child process, its client, metrics and watchdog."""
