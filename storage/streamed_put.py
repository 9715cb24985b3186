"""An object that goes up in parts while it is still being made: each part as soon as its last byte is there.

It holds a few parts at most and never makes its writer wait: while that many are on their way, further ones are left to
the put of the whole object, as are those that fail. It completes nothing; that put does.
"""

from __future__ import annotations

import asyncio
import io
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from storage import s3_multipart
from storage.s3_multipart import PartRules, S3Call, Upload, begin_upload, send_part

__all__ = ["PartStream", "can_stream"]

_log = logging.getLogger(__name__)

_MOST_PARTS: Final = 4  # held in memory, the one that grows among them
_ABORT_S: Final = 10.0


def can_stream(most_bytes: int) -> bool:
    """Whether every object of up to ``most_bytes`` is cut alike, so that any later put finds its own parts."""
    return s3_multipart.part_bytes(most_bytes) == s3_multipart.part_bytes(0)


class PartStream:
    """A GrowingObject at ``place`` (Bucket and Key), and the SentParts of its put. ``loop``: where ``call`` runs.

    `write` and `abandon` come from any thread, `take` from that of the put; the rest lives in the loop's thread.
    """

    def __init__(
        self,
        call: S3Call,
        place: Mapping[str, str],
        rules: PartRules,
        loop: asyncio.AbstractEventLoop,
        on_abandoned: Callable[[], None] = lambda: None,
    ) -> None:
        self._call, self._place, self._rules, self._loop = call, dict(place), rules, loop
        self._on_abandoned = on_abandoned
        self._size = s3_multipart.part_bytes(0)
        self._slots = threading.Semaphore(_MOST_PARTS)
        self._lock = threading.Lock()
        self._part: io.BytesIO | None = None
        self._num_bytes = 0
        self._num_handed = 0
        self._is_over = False  # a part failed, or it was taken or abandoned: no further part is begun
        self._is_settled = False  # taken or abandoned
        self._is_abandoned = False
        self._upload: asyncio.Task[Upload] | None = None
        self._sends: dict[int, asyncio.Task[str]] = {}

    def write(self, data: bytes | memoryview, /) -> None:
        view = memoryview(data).cast("B")
        if self._is_over:
            self._part = None
            self._num_bytes += len(view)
            return
        while len(view):
            place = self._num_bytes % self._size
            if place == 0:
                self._part = io.BytesIO() if self._slots.acquire(blocking=False) else None
            piece = view[: self._size - place]
            if self._part is not None:
                self._part.write(piece)
            self._num_bytes += len(piece)
            view = view[len(piece) :]
            if self._num_bytes % self._size == 0 and self._part is not None:
                self._hand_over(self._num_bytes // self._size, self._part.getvalue())
                self._part = None

    def take(self, num_bytes: int) -> bool:
        """The put of the whole begins: True when it has ``num_bytes`` and a part of it was handed to the loop."""
        with self._lock:
            is_same = self._num_bytes == num_bytes and s3_multipart.part_bytes(num_bytes) == self._size
            if self._is_settled or not is_same or not self._num_handed:
                return False
            self._is_over = self._is_settled = True
        return True

    def abandon(self) -> None:
        with self._lock:
            if self._is_settled:
                return
            self._is_over = self._is_settled = self._is_abandoned = True
        asyncio.run_coroutine_threadsafe(self._abort(), self._loop)

    async def begun(self) -> Upload | None:
        if self._upload is None:
            return None
        try:
            return await asyncio.shield(self._upload)
        except Exception as error:  # noqa: BLE001 - client libraries raise their own roots; the put will say the same
            _log.debug("%s: no parts went ahead: %s", self._place["Key"], type(error).__name__)
            return None

    async def arrival(self, number: int) -> str | None:
        send = self._sends.get(number)
        if send is None:
            return None
        try:
            return await send
        except Exception as error:  # noqa: BLE001 - as in `begun`
            _log.debug("%s: part %d did not go ahead: %s", self._place["Key"], number, type(error).__name__)
            return None

    async def stop(self) -> None:
        for send in self._sends.values():
            send.cancel()
        await asyncio.gather(*self._sends.values(), return_exceptions=True)

    def _hand_over(self, number: int, content: bytes) -> None:
        self._num_handed += 1
        self._loop.call_soon_threadsafe(self._start, number, content)

    def _start(self, number: int, content: bytes) -> None:
        if self._is_abandoned:
            return
        if self._upload is None:
            self._upload = asyncio.ensure_future(self._begin())
        self._sends[number] = send = asyncio.ensure_future(self._send(number, content))
        send.add_done_callback(partial(self._note_end, number))

    async def _begin(self) -> Upload:
        return await asyncio.wait_for(begin_upload(self._call, self._place), self._rules.stall_s)

    async def _send(self, number: int, content: bytes) -> str:
        assert self._upload is not None
        upload = await asyncio.shield(self._upload)
        etag = await send_part(self._call, self._place, upload.upload_id, number, content, self._rules)
        upload.etags[number] = etag
        return etag

    def _note_end(self, number: int, send: asyncio.Task[str]) -> None:
        self._slots.release()
        if not send.cancelled() and (error := send.exception()) is not None:
            self._is_over = True
            _log.info(
                "%s: part %d failed while the object was being made (%s); its put sends what is missing",
                self._place["Key"],
                number,
                type(error).__name__,
            )

    async def _abort(self) -> None:
        await self.stop()
        try:
            upload = await self.begun()
            if upload is not None:
                abort = self._call("abort_multipart_upload", **self._place, UploadId=upload.upload_id)
                await asyncio.wait_for(abort, _ABORT_S)
        except FileNotFoundError:
            pass
        except Exception as error:  # noqa: BLE001 - nobody waits for it, and what stays is swept by age
            _log.warning(
                "the parts of %s stay on the server until unfinished uploads are swept: %s",
                self._place["Key"],
                type(error).__name__,
            )
        finally:
            self._on_abandoned()
