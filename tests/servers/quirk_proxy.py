"""An HTTP proxy in threads whose answers a test decides, request by request, in front of a real store.

Bodies pass through memory whole, so a rule can look at them, change what comes back, or answer itself. Everything that
passed is recorded. `DelayProxy` is the one for holding uploads while they stream.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

__all__ = ["Answer", "QuirkProxy", "Request", "ResetConnection", "error_answer"]

_HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


class ResetConnection(Exception):
    """Raised by a rule: the client sees its connection reset."""


@dataclass(frozen=True)
class Request:
    """What a client sent."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""

    @property
    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.target).query, True).items()}

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def operation(self) -> str:
        """The request by its name in S3, for the ones the tests are about."""
        query, has_key = self.query, self.path.strip("/").count("/") > 0
        names = {
            ("POST", "uploads"): "create-multipart",
            ("GET", "uploads"): "list-multipart",
            ("PUT", "partNumber"): "put-part",
            ("POST", "uploadId"): "complete",
            ("GET", "uploadId"): "list-parts",
            ("DELETE", "uploadId"): "abort",
        }
        for (method, parameter), name in names.items():
            if self.method == method and parameter in query:
                return name
        if self.method == "GET":
            return "get" if has_key else "list"
        return self.method.lower()


@dataclass
class Answer:
    """What a client gets: the body, then nothing until ``stall`` is set; the head promises ``stated_length``."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    has_length: bool = True
    stated_length: int | None = None
    stall: threading.Event | None = None


Forward = Callable[[Request], Answer]
Rule = Callable[[Request, Forward], Answer]


def error_answer(status: int, code: str, message: str = "injected") -> Answer:
    """An S3 error document."""
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()
    return Answer(status, body, {"Content-Type": "application/xml"})


class QuirkProxy:
    """Set `rule` to change what happens, `reset_after` to break a connection in the middle of a body."""

    def __init__(self, backend_port: int) -> None:
        self.rule: Rule = lambda request, forward: forward(request)
        self.reset_after: Callable[[Request], int | None] = lambda _: None
        self.passed: list[Request] = []
        self.expected_continue = 0
        self.backend_port = backend_port
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10.0)

    def clear(self) -> None:
        """No rule, nothing recorded."""
        self.rule = lambda request, forward: forward(request)
        self.reset_after = lambda _: None
        self.passed = []

    def operations(self) -> list[str]:
        return [request.operation for request in self.passed]

    def uploaded_bytes(self) -> int:
        return sum(len(request.body) for request in self.passed if request.method == "PUT")

    def _forward(self, request: Request) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.backend_port, timeout=60)
        try:
            connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(request.body or None)
            response = connection.getresponse()
            headers = {k: v for k, v in response.getheaders() if k.lower() not in _HOP_HEADERS - {"content-length"}}
            return Answer(response.status, response.read(), headers)
        finally:
            connection.close()

    def _handler(proxy) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - the handler below has a self of its own
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                headers = dict(self.headers.items())
                head = Request(self.command, self.path, headers)
                with contextlib.suppress(ConnectionError):
                    limit = proxy.reset_after(head)
                    if limit is not None:
                        self.rfile.read(limit)
                        self._reset()
                        return
                    body = self.rfile.read(int(headers.get("Content-Length", headers.get("content-length", "0"))))
                    request = Request(self.command, self.path, headers, body)
                    proxy.passed.append(request)
                    try:
                        self._answer(request, proxy.rule(request, proxy._forward))
                    except ResetConnection:
                        self._reset()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 - http.server's names

            def _answer(self, request: Request, answer: Answer) -> None:
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() != "content-length":
                        self.send_header(name, value)
                if request.method == "HEAD":
                    length = {k.lower(): v for k, v in answer.headers.items()}.get("content-length")
                    if answer.has_length and length is not None:
                        self.send_header("Content-Length", length)
                    elif not answer.has_length:
                        self.send_header("Connection", "close")
                    self.end_headers()
                    return
                if answer.has_length:
                    stated = len(answer.body) if answer.stated_length is None else answer.stated_length
                    self.send_header("Content-Length", str(stated))
                else:
                    self.send_header("Connection", "close")
                    self.close_connection = True
                self.end_headers()
                self.wfile.write(answer.body)
                self.wfile.flush()
                if answer.stall is not None:
                    answer.stall.wait(120.0)
                if answer.stated_length is not None:
                    self.close_connection = True

            def _reset(self) -> None:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()

            def handle_expect_100(self) -> bool:
                proxy.expected_continue += 1
                self.send_error(417)
                return False

            def log_message(self, *_: Any) -> None:
                """Nothing on stderr."""

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError, ValueError):
                    super().handle()

            def finish(self) -> None:
                with contextlib.suppress(ConnectionError, ValueError, OSError):
                    super().finish()

        return Handler
