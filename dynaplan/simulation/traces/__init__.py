"""Streams of requests: files of several formats, and made-up load. All are read one request at a time."""
