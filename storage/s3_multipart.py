"""One large object on its way to an S3 server in parts: planned, sent, resumed, completed, checked.

A try that fails leaves its parts on the server. The next one, from this process or another, finds the upload by the
object's exact key and sends only what is missing. Nothing is believed of a listed part but what our own bytes confirm.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from storage.retrying import backoff_s
from storage.s3_body import WatchedBody, send_watched
from storage.store_failures import error_code, http_status, is_stale_credential, is_unsupported

__all__ = [
    "MultipartPut",
    "PartRules",
    "SentParts",
    "Upload",
    "begin_upload",
    "list_uploads",
    "part_bytes",
    "send_part",
    "stored_size",
]

_log = logging.getLogger(__name__)

S3Call = Callable[..., Awaitable[dict[str, Any]]]

_MIB = 1 << 20
_MAX_PARTS = 10_000
_SMALLEST_PART = 16 * _MIB
_MAX_PAGES = 1000
_USELESS = {"InvalidPart", "InvalidPartOrder", "NoSuchUpload", "EntityTooSmall"}


def part_bytes(size: int) -> int:
    """Size of one part of an object of ``size`` bytes: whole MiB, so many that 9,000 parts are enough."""
    needed = -(-size // (_MAX_PARTS - 1000))
    return max(_SMALLEST_PART, -(-needed // _MIB) * _MIB)


@dataclass(slots=True)
class Upload:
    """An unfinished upload of one object and the parts that are known to be stored in it, number to ETag."""

    upload_id: str
    etags: dict[int, str] = field(default_factory=dict)
    is_complete_sent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRules:
    """How parts are sent: how many at once, how long one may stand still and take, how often it is sent again."""

    parallel: int = 4
    stall_s: float
    limit_s: Callable[[int], float]
    retries: int = 0
    on_retry: Callable[[], None] = lambda: None
    rng: random.Random = field(default_factory=random.Random)


class SentParts(Protocol):
    """Parts of the very bytes of a put that this process began to send before the put. Used in the loop's thread."""

    async def begun(self) -> Upload | None:
        """The upload that they are in; None where it could not be begun. Never raises."""
        ...

    async def arrival(self, number: int) -> str | None:
        """The ETag of a part once it is stored; None when it was not sent, or in vain."""
        ...

    async def stop(self) -> None:
        """Return once none of them is on its way any more."""
        ...


class MultipartPut:
    """The put of ``view`` to ``place`` (Bucket and Key). ``known``: what an earlier try of this process left.

    ``sent``: parts that need be neither sent nor checked again; the put goes on in their upload.
    """

    def __init__(
        self,
        call: S3Call,
        place: Mapping[str, str],
        view: memoryview,
        rules: PartRules,
        known: Upload | None = None,
        sent: SentParts | None = None,
    ) -> None:
        self._call = call
        self._place = dict(place)
        self._view = view
        self._rules = rules
        self._known, self._sent = known, sent
        self._size = part_bytes(len(view))
        self._num_parts = -(-len(view) // self._size)
        self.upload: Upload | None = known

    async def run(self) -> None:
        """Return once the whole object is stored under its key; on any failure `upload` tells what stays behind."""
        if self._known is not None and self._known.is_complete_sent and await self._is_stored(self._known):
            return
        self.upload = None if self._sent is None else await self._sent.begun()
        if self.upload is None:
            self.upload = await self._unfinished() or await begin_upload(self._call, self._place)
        try:
            await self._send_missing(self.upload)
            await self._complete(self.upload)
        except OSError as error:
            if error_code(error) in _USELESS:
                if self.upload.is_complete_sent and await self._is_stored(self.upload):
                    return
                await self.abort()
            raise

    async def abort(self) -> None:
        """Drop the upload with all its parts."""
        upload, self.upload = self.upload, None
        if upload is not None:
            try:
                await self._call("abort_multipart_upload", **self._place, UploadId=upload.upload_id)
            except FileNotFoundError:
                return

    async def _unfinished(self) -> Upload | None:
        """The newest unfinished upload of this very key whose parts are cut as ours, with those that hold our bytes."""
        try:
            found = [
                item
                for item in await list_uploads(self._call, self._place["Bucket"], self._place["Key"])
                if item["Key"] == self._place["Key"]
            ]
            for item in sorted(found, key=lambda item: str(item.get("Initiated", "")), reverse=True):
                parts = await self._list_parts(item["UploadId"])
                if all(part.get("Size") == self._length(part["PartNumber"]) for part in parts):
                    return Upload(upload_id=item["UploadId"], etags=await asyncio.to_thread(self._ours, parts))
        except (OSError, NotImplementedError) as error:
            if not (is_unsupported(error) or isinstance(error, FileNotFoundError | PermissionError)):
                raise
            if is_stale_credential(error) or error_code(error) == "NoSuchBucket":
                raise
            _log.debug("unfinished uploads cannot be listed: %s", type(error).__name__)
            return await asyncio.to_thread(self._recalled)
        return None

    def _recalled(self) -> Upload | None:
        """What this process remembers of its last try, for a server that lists neither uploads nor parts."""
        if self._known is None:
            return None
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in self._known.etags.items()]
        return Upload(upload_id=self._known.upload_id, etags=self._ours(parts))

    def _ours(self, parts: list[dict[str, Any]]) -> dict[int, str]:
        """Those of ``parts`` that hold our bytes. An ETag that is no MD5 proves nothing: such a part is sent again."""
        kept = {}
        for part in parts:
            number, etag = part["PartNumber"], str(part.get("ETag") or "")
            if etag.strip('"').lower() == hashlib.md5(self._slice(number), usedforsecurity=False).hexdigest():
                kept[number] = etag
        if kept:
            _log.info("%s: %d of %d parts are stored already", self._place["Key"], len(kept), self._num_parts)
        return kept

    async def _list_parts(self, upload_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        marker = 0
        for _ in range(_MAX_PAGES):
            more = {"PartNumberMarker": marker} if marker else {}
            page = await self._call("list_parts", **self._place, UploadId=upload_id, **more)
            found += page.get("Parts") or []
            following = int(page.get("NextPartNumberMarker") or 0)
            if not page.get("IsTruncated") or following <= marker:
                break
            marker = following
        return found

    async def _send_missing(self, upload: Upload) -> None:
        slots = asyncio.Semaphore(self._rules.parallel)

        async def send(number: int) -> None:
            async with slots:
                etag = None if self._sent is None else await self._sent.arrival(number)
                upload.etags[number] = etag or await self._send(upload.upload_id, number)

        sends = [
            asyncio.ensure_future(send(number))
            for number in range(1, self._num_parts + 1)
            if number not in upload.etags
        ]
        try:
            await asyncio.gather(*sends)
        finally:
            # No part may arrive after the upload was completed or aborted: it would stay on the server for ever.
            for task in sends:
                task.cancel()
            await asyncio.gather(*sends, return_exceptions=True)
            if self._sent is not None:
                await self._sent.stop()

    async def _send(self, upload_id: str, number: int) -> str:
        return await send_part(self._call, self._place, upload_id, number, self._slice(number), self._rules)

    async def _complete(self, upload: Upload) -> None:
        upload.is_complete_sent = True
        parts = [{"PartNumber": number, "ETag": upload.etags[number]} for number in sorted(upload.etags)]
        await self._call(
            "complete_multipart_upload", **self._place, UploadId=upload.upload_id, MultipartUpload={"Parts": parts}
        )
        # Some servers answer 200 before they are done, with an error in the body or with nothing in it.
        size = await stored_size(self._call, self._place)
        if size != len(self._view):
            raise OSError(errno.EIO, f"after its completion {size} of {len(self._view)} bytes are stored")

    async def _is_stored(self, upload: Upload) -> bool:
        """Whether a completion whose answer was lost took place, with exactly the bytes at hand."""
        if sorted(upload.etags) != [*range(1, self._num_parts + 1)]:
            return False
        digests = await asyncio.to_thread(lambda: [*self._digests()])
        if any(upload.etags[number].strip('"').lower() != digest.hex() for number, digest in enumerate(digests, 1)):
            return False
        try:
            head = await self._call("head_object", **self._place)
        except FileNotFoundError:
            return False
        whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
        etag = str(head.get("ETag") or "").strip('"').lower()
        return etag == f"{whole}-{self._num_parts}" and head.get("ContentLength", len(self._view)) == len(self._view)

    def _digests(self) -> Iterator[bytes]:
        for number in range(1, self._num_parts + 1):
            yield hashlib.md5(self._slice(number), usedforsecurity=False).digest()

    def _slice(self, number: int) -> memoryview:
        return self._view[(number - 1) * self._size : number * self._size]

    def _length(self, number: int) -> int:
        return len(self._slice(number))


async def begin_upload(call: S3Call, place: Mapping[str, str]) -> Upload:
    """A new, empty upload of the object at ``place``."""
    answer = await call("create_multipart_upload", **place)
    return Upload(upload_id=answer["UploadId"])


async def send_part(
    call: S3Call, place: Mapping[str, str], upload_id: str, number: int, content: bytes | memoryview, rules: PartRules
) -> str:
    """The ETag of one part, sent again after a quick failure; a stall is left to the caller, whose next try goes on."""
    retry = 0
    while True:
        body = WatchedBody(content)
        sent = call("upload_part", **place, UploadId=upload_id, PartNumber=number, Body=body)
        try:
            answer = await send_watched(sent, body, stall_s=rules.stall_s, limit_s=rules.limit_s(len(content)))
        except Exception as error:
            if retry >= rules.retries or not _may_pass(error):
                raise
        else:
            if etag := answer.get("ETag"):
                return str(etag)
            raise OSError(errno.EIO, f"part {number} was answered without an ETag")
        rules.on_retry()
        await asyncio.sleep(backoff_s(retry, first_s=0.2, longest_s=5.0, rng=rules.rng))
        retry += 1


async def list_uploads(call: S3Call, bucket: str, prefix: str) -> list[dict[str, Any]]:
    """Every unfinished upload whose key begins with ``prefix``."""
    found: list[dict[str, Any]] = []
    markers: dict[str, str] = {}
    for _ in range(_MAX_PAGES):
        page = await call("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **markers)
        found += [item for item in page.get("Uploads") or [] if item["Key"].startswith(prefix)]
        following = {
            "KeyMarker": page.get("NextKeyMarker") or "",
            "UploadIdMarker": page.get("NextUploadIdMarker") or "",
        }
        following = {name: value for name, value in following.items() if value}
        if not page.get("IsTruncated") or not following or following == markers:
            break
        markers = following
    return found


async def stored_size(call: S3Call, place: Mapping[str, str]) -> int | None:
    """Size of an object, or None where there is none; from a listing where a HEAD does not tell it."""
    try:
        head = await call("head_object", **place)
        if head.get("ContentLength") is not None:
            return int(head["ContentLength"])
    except FileNotFoundError:
        return None
    except OSError as error:
        if http_status(error) not in (400, 403, 405, 501) or is_stale_credential(error):
            raise
    page = await call("list_objects_v2", Bucket=place["Bucket"], Prefix=place["Key"])
    return next((int(item["Size"]) for item in page.get("Contents") or [] if item["Key"] == place["Key"]), None)


def _may_pass(error: Exception) -> bool:
    if isinstance(error, TimeoutError | PermissionError | FileNotFoundError) or is_stale_credential(error):
        return False
    status = http_status(error)
    return status == 0 or status >= 500 or status in (408, 409, 429)
