"""Base class of small JSON services over HTTP: answers with their length, and no log line for each request."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    """`do_POST` is the service's own; it reads with `request_json` and ends with `answer`."""

    def request_json(self, max_bytes: int) -> Any:
        """The JSON value of the request's body, of the length that it declares. Raises ValueError: there is none."""
        length = self.headers.get("Content-Length") or "0"
        if not length.isdecimal() or int(length) > max_bytes:
            raise ValueError(f"Content-Length is {length:.40}: give the body's, at most {max_bytes}")
        try:
            return json.loads(self.rfile.read(int(length)))
        except RecursionError:
            raise ValueError("the body is nested too deep") from None

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
