"""Bytes on their way up, watched: a server that takes no more of them is noticed long before the whole would be due.

aiohttp gives a blocked write no time-out, so progress is seen where it asks for the next chunk.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

__all__ = ["WatchedBody", "send_watched", "without_expectation"]

T = TypeVar("T")

_CANCEL_S = 5.0


class WatchedBody(io.BytesIO):
    """The body of one request that knows when it was last read from."""

    def __init__(self, content: bytes | memoryview) -> None:
        super().__init__(content)
        self.moved_s = time.monotonic()

    def read(self, size: int | None = -1, /) -> bytes:
        self.moved_s = time.monotonic()
        return super().read(size)

    def getbuffer(self) -> memoryview:
        """Read-only. aiohttp asks for it to learn the size, and one that could be written to would be a copy."""
        return memoryview(self.getvalue())


async def send_watched(request: Awaitable[T], body: WatchedBody, *, stall_s: float, limit_s: float) -> T:
    """What ``request`` returns; TimeoutError once ``body`` did not move for ``stall_s``, or after ``limit_s``."""
    task = asyncio.ensure_future(request)
    end_s = time.monotonic() + limit_s
    try:
        while True:
            left_s = min(body.moved_s + stall_s, end_s) - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            if (await asyncio.wait({task}, timeout=left_s))[0]:
                return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_S)


def without_expectation(params: dict[str, Any], **_: Any) -> None:
    """Send the body at once: some servers refuse `Expect: 100-continue`, and waiting for a stalled one has no end."""
    params.get("headers", {}).pop("Expect", None)
