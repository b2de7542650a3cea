"""Base class of small JSON services over HTTP: answers with their length, and no log line for each request."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    """`do_POST` is the service's own; it reads with `body` and ends with `answer`."""

    def body(self, max_bytes: int) -> bytes:
        """Read the request's body of the length that it declares, at most `max_bytes`."""
        return self.rfile.read(min(max_bytes, int(self.headers.get("Content-Length") or 0)))

    def answer(self, status: int, content: dict[str, Any]) -> None:
        """One JSON object."""
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """One line for each request would flood a terminal."""
