"""A real HTTP server whose answers a test chooses."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Reply = tuple[int, Any, dict[str, str]]


class Server:
    """Answers by ``reply(request)``; remembers what it was asked, and when."""

    def __init__(self) -> None:
        self.reply: Callable[[Any], Reply] = lambda request: (200, {}, {})
        self.requests: list[Any] = []
        self.times: list[float] = []
        self.headers: list[dict[str, str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.times.append(time.monotonic())
                server.requests.append(request)
                server.headers.append(dict(self.headers))
                status, answer, headers = server.reply(request)
                body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.handle_error = lambda *of: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/score"
        threading.Thread(target=self.http.serve_forever, args=[0.02], daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()
