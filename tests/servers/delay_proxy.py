"""An HTTP proxy in a thread that delays, holds or refuses uploads on their way to a store.

Pure Python. It parses requests only as far as framing needs (head and body length) and passes answers through as
they come. `hold` and `wait_held` let a test act while an upload is under way, without any clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Self

__all__ = ["DelayProxy"]

_CHUNK_BYTES = 1 << 16
_HEAD_BYTES = 1 << 16
_REFUSALS = {
    503: (b"Slow Down", b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>"),
    403: (b"Forbidden", b"<Error><Code>AccessDenied</Code><Message>injected</Message></Error>"),
}


class DelayProxy:
    """Every request whose method is in `methods` and whose target matches `pattern` waits `delay_s` first."""

    def __init__(
        self,
        backend_port: int,
        *,
        delay_s: float = 0.0,
        methods: frozenset[str] = frozenset({"PUT"}),
        pattern: str = "",
    ) -> None:
        self.delay_s = delay_s
        self.port = 0
        self.num_matched = 0
        self._backend_port = backend_port
        self._methods = methods
        self._pattern = re.compile(pattern)
        self._num_refusals = 0
        self._refusal_status = 503
        self._num_waiting = self._most_waiting = 0
        self._waits = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="delay-proxy", daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        self._thread.start()
        self._call(self._listen()).result(10.0)
        return self

    def hold(self) -> None:
        """From now on matching requests wait until `release`."""
        with self._waits:
            self._most_waiting = self._num_waiting
        self._call(self._set_open(False)).result(10.0)

    def wait_held(self, timeout_s: float, number: int = 1) -> None:
        """Return as soon as ``number`` matching requests wait at once, held or delayed."""
        with self._waits:
            if not self._waits.wait_for(lambda: self._most_waiting >= number, timeout_s):
                raise TimeoutError(
                    f"{self._most_waiting} of {number} requests matching {self._pattern.pattern!r} waited "
                    f"within {timeout_s} s"
                )

    def release(self) -> None:
        self._call(self._set_open(True)).result(10.0)

    def refuse_next(self, number: int, *, status: int = 503) -> None:
        """Answer the next `number` matching requests with 503 or 403 instead of passing them on."""
        self._num_refusals, self._refusal_status = number, status

    def break_connections(self) -> None:
        """Cut every connection that is open now, whatever it waits for; new ones are served."""
        self._call(self._cut()).result(10.0)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._call(self._shut()).result(10.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10.0)
        self._loop.close()

    def _call(self, coroutine: Coroutine[None, None, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _set_open(self, is_open: bool) -> None:
        if is_open:
            self._open.set()
        else:
            self._open.clear()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _shut(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._cut()

    async def _cut(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A connection that breaks on either side ends this exchange, and so does `stop`; the client sees both as a
        # broken connection.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._exchange(reader, writer)
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        store, backend = await asyncio.open_connection("127.0.0.1", self._backend_port)
        answers = asyncio.create_task(self._pass_answers(store, writer))
        try:
            await self._pass_requests(reader, writer, backend)
        finally:
            backend.close()
            answers.cancel()
            await asyncio.gather(answers, return_exceptions=True)

    async def _pass_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, backend: asyncio.StreamWriter
    ) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if self._matches(head):
                self.num_matched += 1
                if self._num_refusals > 0:
                    self._num_refusals -= 1
                    await self._refuse(writer)
                    return
                await self._wait()
            backend.write(head)
            await self._pass_body(head, reader, backend)
            await backend.drain()

    async def _wait(self) -> None:
        if not self.delay_s and self._open.is_set():
            return
        self._count_waiting(1)
        try:
            await self._open.wait()
            await asyncio.sleep(self.delay_s)
        finally:
            self._count_waiting(-1)

    def _count_waiting(self, more: int) -> None:
        with self._waits:
            self._num_waiting += more
            self._most_waiting = max(self._most_waiting, self._num_waiting)
            self._waits.notify_all()

    def _matches(self, head: bytes) -> bool:
        method, target = head.split(b" ", 2)[:2]
        return method.decode() in self._methods and self._pattern.search(target.decode()) is not None

    async def _refuse(self, writer: asyncio.StreamWriter) -> None:
        # The body is not read, so the connection cannot be used again.
        reason, body = _REFUSALS[self._refusal_status]
        writer.write(
            f"HTTP/1.1 {self._refusal_status} ".encode()
            + reason
            + b"\r\nContent-Type: application/xml\r\nConnection: close\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()

    @staticmethod
    async def _pass_body(head: bytes, reader: asyncio.StreamReader, backend: asyncio.StreamWriter) -> None:
        lowered = head.lower()
        if b"\r\ntransfer-encoding: chunked" in lowered:
            size = -1
            while size != 0:
                line = await reader.readuntil(b"\r\n")
                size = int(line.split(b";")[0], 16)
                backend.write(line + await reader.readexactly(size + 2))
                await backend.drain()
            return
        length = re.search(rb"\r\ncontent-length: *(\d+)", lowered)
        left = int(length.group(1)) if length else 0
        while left:
            data = await reader.read(min(left, _CHUNK_BYTES))
            if not data:
                raise asyncio.IncompleteReadError(b"", left)
            backend.write(data)
            await backend.drain()
            left -= len(data)

    @staticmethod
    async def _pass_answers(store: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await store.read(_CHUNK_BYTES):
                writer.write(data)
                await writer.drain()
        writer.close()
