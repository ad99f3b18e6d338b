#!/usr/bin/env python3
"""A program that nothing is known of: a chat whose message says how it is answered, and paths of its own.

    any_server.py --port PORT [--base /PATH] [--unchecked]

``--base`` is put before all its paths; ``--unchecked`` answers 404 to everything that is no request.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ANSWER = {"object": "chat.completion", "choices": [{"index": 0, "message": {"content": "whole"}}]}
EVENT = {"choices": [{"index": 0, "delta": {"content": "part"}}]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    base, is_unchecked = "", False

    def do_GET(self) -> None:
        path = self.path.removeprefix(self.base).partition("?")[0]
        if self.is_unchecked or not self.path.startswith(self.base):
            self.say(404, b"nothing here")
        elif path == "/":
            self.say(200, b"<html>its own page</html>", "text/html; charset=utf-8")
        elif path in ("/health", "/v1/models"):
            self.say(200, b"{}", "application/json")
        elif path == "/props":
            self.echo()
        else:
            self.say(404, b"nothing here")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.removeprefix(self.base) in ("/v1/chat/completions", "/completion"):
            self.answer(json.loads(body))
        else:
            self.echo(body)

    do_PUT = do_DELETE = do_POST

    def answer(self, request: dict[str, Any]) -> None:
        asked = request["messages"][-1]["content"] if "messages" in request else request["prompt"]
        if asked == "whole":
            self.say(200, json.dumps({**ANSWER, "request": request}).encode(), "application/json")
        elif asked.isdigit():
            self.say(int(asked), b"<p>its own words</p>", "text/html")
        else:
            self.stream("break" if asked == "break" else "end")

    def stream(self, how: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(2):
            data = b"data: " + json.dumps(EVENT).encode() + b"\n\n"
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        if how == "end":
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True

    def echo(self, body: bytes = b"") -> None:
        """Say what was asked, and how."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        text = body.decode("utf-8", "replace")
        said = {"method": self.command, "path": self.path, "headers": headers, "body": text}
        self.say(200, json.dumps(said).encode(), "application/json")

    def say(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Access-Control-Allow-Origin", "*")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        print("any server:", format % args, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--base", default="")
    parser.add_argument("--unchecked", action="store_true")
    given = parser.parse_args()
    Handler.base, Handler.is_unchecked = given.base, given.unchecked
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
