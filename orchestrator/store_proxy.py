"""A TCP proxy between a run and its store, which can fall silent: the store is away, and nobody is told.

While it is cut, bytes are neither taken nor given and new connections find an open port that never answers, as behind
a dead switch. Nothing is understood or changed on the way; TLS passes as it is.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from orchestrator.errors import SupervisorError

__all__ = ["StoreProxy"]

_log = logging.getLogger(__name__)
_CHUNK_BYTES: Final = 1 << 16
_START_S: Final = 10.0
_CONNECT_S: Final = 10.0
_PORTS: Final = {"http": 80, "https": 443}


class StoreProxy:
    """Listens on ``host`` in a thread of its own, forwards to ``target`` (an endpoint URL). Close it in any case."""

    def __init__(self, target: str, *, host: str = "127.0.0.1") -> None:
        parts = urlsplit(target)
        if parts.scheme != "http" or parts.hostname is None:
            # With TLS the store's certificate would have to name this machine.
            raise SupervisorError(f"the store's endpoint {target!r} is not one that a proxy can stand in for: use http")
        self.target = target
        self._upstream = (parts.hostname, parts.port or _PORTS[parts.scheme])
        self._host, self._parts = host, parts
        self._loop = asyncio.new_event_loop()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._port = 0
        self._is_up = threading.Event()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="store-proxy", daemon=True)
        self._thread.start()
        if not self._is_up.wait(_START_S) or self._failure is not None:
            raise SupervisorError(f"the proxy before {target} cannot listen on {host}: {self._failure}")

    @property
    def endpoint(self) -> str:
        """The URL to reach the store through this proxy."""
        return urlunsplit(self._parts._replace(netloc=f"{self._host}:{self._port}"))

    def cut(self) -> None:
        """From now on nothing passes, either way."""
        self._loop.call_soon_threadsafe(self._is_open.clear)

    def mend(self) -> None:
        """Let everything through again, what was held back first."""
        self._loop.call_soon_threadsafe(self._is_open.set)

    def close(self) -> None:
        """End all connections and the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            server = self._loop.run_until_complete(asyncio.start_server(self._serve, self._host, 0))
        except OSError as error:
            self._failure = error
            self._is_up.set()
            return
        self._port = server.sockets[0].getsockname()[1]
        self._is_up.set()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            for task in (tasks := asyncio.all_tasks(self._loop)):
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._is_open.wait()
        try:
            upstream = await asyncio.wait_for(asyncio.open_connection(*self._upstream), _CONNECT_S)
        except (OSError, TimeoutError) as error:
            _log.debug("the store at %s:%d does not answer: %s", *self._upstream, error)
            writer.close()
            return
        up_reader, up_writer = upstream
        try:
            await asyncio.gather(self._pass(reader, up_writer), self._pass(up_reader, writer))
        except OSError as error:
            _log.debug("a connection to the store broke: %s", error)
        finally:
            up_writer.close()
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await self._is_open.wait()
            writer.write(data)
            await writer.drain()
        await self._is_open.wait()
        writer.write_eof()
