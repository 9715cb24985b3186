"""S3 and servers that speak its protocol: one request a call, on aiobotocore's client that s3fs opens.

s3fs' own file operations are not used: they cache, retry out of sight, and publish what an exception cut short. Nothing
here rests on what a server may leave out; `storage/store_facts.py` tells what one was seen to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from storage.config import StoreConfig
from storage.errors import StorageError
from storage.fsspec_store import CreateAnswer, FsspecStore
from storage.object_keys import checked_name
from storage.object_store import GrowingObject
from storage.retry_tally import RetryTally, current_tally
from storage.s3_body import WatchedBody, send_watched, without_expectation
from storage.s3_listing import list_objects
from storage.s3_multipart import MultipartPut, PartRules, Upload, list_uploads, part_bytes
from storage.scrubbing import secrets_of_url
from storage.store_failures import error_code, http_status, is_unsupported
from storage.streamed_put import PartStream, can_stream

__all__ = ["S3Store", "part_bytes"]

_log = logging.getLogger(__name__)

_MIB = 1 << 20
_CHUNK = 1 * _MIB
_PARALLEL = 16
_CONNECT_DEADLINE_S = 10.0
_NO_DEADLINE_S = 86_400.0
_LONGEST_BYTES = 1 << 43
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/")
# At DEBUG these write whole requests, with their signatures and session tokens.
_TALKATIVE = ("botocore", "aiobotocore", "aiohttp", "s3fs", "urllib3")


class S3Store(FsspecStore):
    """Objects below ``s3://bucket/prefix``. Credentials come from the environment or the machine's role."""

    def __init__(self, url: str, config: StoreConfig | None = None, *, multipart_bytes: int = 32 * _MIB) -> None:
        config = config or StoreConfig()
        self._multipart_bytes = multipart_bytes
        self._retries = config.retries
        self._num_retries = 0
        self._unfinished: dict[str, Upload] = {}
        self._growing: dict[str, PartStream] = {}
        self._in_hand: set[str] = set()
        self._ignores_ranges = False
        endpoint = config.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        super().__init__(url, {"endpoint_url": endpoint, "config_kwargs": _client_settings(config)})
        self._min_bytes_per_s = config.min_bytes_per_s
        self._secrets += secrets_of_url(endpoint or "")

    @property
    def num_retries(self) -> int:
        """Parts that were sent again inside one put."""
        return self._num_retries

    def grow(self, key: str, most_bytes: int, *, deadline_s: float = 60.0) -> GrowingObject | None:
        if most_bytes < self._multipart_bytes or not can_stream(most_bytes):
            return None
        checked_name(key, self._url)
        return self._named("grow", key, deadline_s, lambda: self._grow(key, deadline_s))

    def give_up(self, key: str, *, deadline_s: float = 10.0) -> None:
        upload = self._unfinished.pop(key, None)
        if upload is None:
            return
        try:
            self._named(
                "abort", key, deadline_s, lambda: self._abort([(self._path(key), upload.upload_id)], deadline_s)
            )
        except StorageError as error:
            _log.warning("the parts of %s stay on the server until unfinished uploads are swept: %s", key, error)

    def abort_uploads(self, prefix: str, *, older_than_s: float, deadline_s: float = 60.0) -> int:
        def abort() -> int:
            bucket, start = self._place(self._path(prefix)).values()
            try:
                found = self._run(lambda: list_uploads(self._request, bucket, start), deadline_s)
            except OSError as error:
                if not is_unsupported(error) and error_code(error) != "AccessDenied":
                    raise
                _log.warning(
                    "%s does not tell its unfinished uploads (%s): none are swept", self._url, error_code(error)
                )
                return 0
            mine = len(self._root.partition("/")[2])
            ours = self._in_hand | self._growing.keys()
            uploads = [
                (f"{bucket}/{item['Key']}", str(item["UploadId"]))
                for item in found
                if _age_s(item.get("Initiated")) >= older_than_s and item["Key"][mine:].lstrip("/") not in ours
            ]
            return self._abort([u for u in uploads if self._is_idle(*u, older_than_s, deadline_s)], deadline_s)

        return self._named("abort_uploads", prefix, deadline_s, abort)

    def unfinished_uploads(self, prefix: str, *, deadline_s: float = 60.0) -> Sequence[str]:
        """Keys of uploads that were begun and never ended; their parts lie on the server, unseen and paid for."""

        def look() -> Sequence[str]:
            bucket, start = self._place(self._path(prefix)).values()
            mine = len(self._root.partition("/")[2])
            found = self._run(lambda: list_uploads(self._request, bucket, start), deadline_s)
            return sorted(str(item["Key"])[mine:].lstrip("/") for item in found)

        return self._named("list", prefix, deadline_s, look)

    def try_create_in_parts(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> CreateAnswer:
        """As `try_create`, with the condition on the completion of a multipart upload: some honour it only on a put."""

        async def create() -> CreateAnswer:
            place = self._place(self._path(key))
            upload = {**place, "UploadId": (await self._request("create_multipart_upload", **place))["UploadId"]}
            try:
                etag = (await self._request("upload_part", **upload, PartNumber=1, Body=data)).get("ETag") or ""
                parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
                await self._request("complete_multipart_upload", **upload, MultipartUpload=parts, IfNoneMatch="*")
            except OSError as error:
                with contextlib.suppress(OSError):
                    await self._request("abort_multipart_upload", **upload)
                if http_status(error) == 412 or isinstance(error, FileExistsError):
                    return "exists"
                if is_unsupported(error):
                    return "unsupported"
                raise
            return "created"

        return self._named("create", key, deadline_s, lambda: self._run(create, deadline_s))

    def clock_skew_s(self, *, deadline_s: float = 60.0) -> float | None:
        """How far the server's clock is ahead of ours, to about a second; None where it does not tell."""
        bucket, start = self._place(self._path("")).values()

        def ask() -> dict[str, Any]:
            return self._run(
                lambda: self._request("list_objects_v2", Bucket=bucket, Prefix=start, MaxKeys=1), deadline_s
            )

        answer = self._named("list", "", deadline_s, ask)
        date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        try:
            return parsedate_to_datetime(date).timestamp() - time.time() if date else None
        except ValueError:
            return None

    def _configure(self, filesystem: Any) -> None:
        filesystem.retries = 1  # every retry is ours: counted, logged, bounded by our deadlines
        for name in _TALKATIVE:
            logger = logging.getLogger(name)
            if logger.level == logging.NOTSET:
                logger.setLevel(logging.WARNING)

    async def _request(self, method: str, **arguments: Any) -> dict[str, Any]:
        filesystem = self._filesystem()
        client = await filesystem.set_session()
        client.meta.events.register_last("before-call.s3", without_expectation, unique_id="raysume-send-at-once")
        answer: dict[str, Any] = await filesystem._call_s3(method, **arguments)
        return answer

    @staticmethod
    def _place(path: str) -> dict[str, str]:
        bucket, _, key = path.partition("/")
        return {"Bucket": bucket, "Key": key}

    def _write(self, path: str, data: bytes | memoryview, deadline_s: float) -> None:
        view = memoryview(data).cast("B")
        key = path[len(self._root) + 1 :]
        self._in_hand.add(key)
        try:
            self._write_in_hand(path, key, view, deadline_s)
        finally:
            self._in_hand.discard(key)

    def _write_in_hand(self, path: str, key: str, view: memoryview, deadline_s: float) -> None:
        stream = self._growing.pop(key, None)
        if stream is not None and not stream.take(len(view)):
            stream.abandon()
            stream = None
        if len(view) < self._multipart_bytes and stream is None:
            self._put_whole(path, view, deadline_s)
            return
        rules, known = self._part_rules(deadline_s), self._unfinished.get(key)
        put = MultipartPut(self._request, self._place(path), view, rules, known, stream)
        try:
            self._run(put.run, deadline_s + len(view) / self._min_bytes_per_s)
        except BaseException:
            if put.upload is not None:
                self._unfinished[key] = put.upload
            raise
        self._unfinished.pop(key, None)

    def _grow(self, key: str, deadline_s: float) -> PartStream:
        place, loop = self._place(self._path(key)), self._filesystem().loop

        def forget() -> None:
            if self._growing.get(key) is stream:
                del self._growing[key]

        stream = PartStream(self._request, place, self._part_rules(deadline_s), loop, forget)
        older, self._growing[key] = self._growing.get(key), stream
        if older is not None:
            older.abandon()
        return stream

    def _part_rules(self, deadline_s: float) -> PartRules:
        return PartRules(
            # Parts that go up side by side share the line.
            stall_s=deadline_s,
            limit_s=lambda size: deadline_s + 4 * size / self._min_bytes_per_s,
            retries=self._retries,
            on_retry=partial(self._count_retry, current_tally()),  # parts go up in the event loop's thread
        )

    def _count_retry(self, tally: RetryTally | None) -> None:
        self._num_retries += 1
        if tally is not None:
            tally.add()

    def _create(self, path: str, data: bytes, deadline_s: float) -> None:
        self._put_whole(path, memoryview(data), deadline_s, IfNoneMatch="*")

    def _put_whole(self, path: str, view: memoryview, deadline_s: float, **condition: str) -> None:
        limit_s = deadline_s + len(view) / self._min_bytes_per_s

        async def put() -> None:
            body = WatchedBody(view)
            sent = self._request("put_object", **self._place(path), Body=body, **condition)
            await send_watched(sent, body, stall_s=deadline_s, limit_s=limit_s)

        self._run(put, limit_s)

    def _read(self, path: str, deadline_s: float) -> bytes:
        answer = self._run(lambda: self._request("get_object", **self._place(path)), deadline_s)
        length = answer.get("ContentLength")
        content = self._drain(answer, 0, None, deadline_s)
        if length is not None and len(content) != length:
            raise OSError(f"{len(content)} of {length} bytes came")
        return content

    def _read_range(self, path: str, offset: int, length: int, deadline_s: float) -> bytes:
        wanted = f"bytes={offset}-{offset + length - 1}"
        try:
            answer = self._run(lambda: self._request("get_object", **self._place(path), Range=wanted), deadline_s)
        except OSError as error:
            if http_status(error) == 416 or error_code(error) == "InvalidRange":
                return b""
            raise
        if answer.get("ResponseMetadata", {}).get("HTTPStatusCode") != 206:
            if not self._ignores_ranges:
                self._ignores_ranges = True
                _log.warning("%s sends whole objects where a part is asked for: restores read more", self._url)
            return self._drain(answer, offset, length, deadline_s)
        told = _CONTENT_RANGE.match(answer.get("ContentRange") or "")
        if told is not None and int(told[1]) != offset:
            answer["Body"].close()
            raise OSError(f"bytes from {told[1]} came where bytes from {offset} were asked for")
        return self._drain(answer, 0, length + 1, deadline_s)

    def _drain(self, answer: dict[str, Any], skip: int, length: int | None, deadline_s: float) -> bytes:
        """The body from ``skip`` on, at most ``length`` bytes. A stall is noticed after ``deadline_s``."""
        body = answer["Body"]
        expected = answer.get("ContentLength") or _LONGEST_BYTES

        async def read() -> bytes:
            chunks: list[bytes] = []
            ahead, taken = skip, 0
            while length is None or taken < length:
                chunk = await asyncio.wait_for(body.read(_CHUNK), deadline_s)
                if not chunk:
                    break
                used = chunk[ahead:] if length is None else chunk[ahead : ahead + length - taken]
                ahead = max(0, ahead - len(chunk))
                taken += len(used)
                chunks.append(used)
            return b"".join(chunks)

        try:
            return self._run(read, deadline_s + expected / self._min_bytes_per_s)
        finally:
            self._filesystem().loop.call_soon_threadsafe(body.close)

    def _find(self, path: str, deadline_s: float) -> Sequence[dict[str, Any]]:
        bucket, prefix = self._place(path).values()
        found: list[dict[str, Any]] = []
        pages = list_objects(self._request, bucket, prefix)
        while True:
            # Each page has the deadline of its own: a listing may be long, a page may not.
            page = self._run(lambda: anext(pages, None), deadline_s)
            if page is None:
                return found
            found += [{"name": f"{bucket}/{item['Key']}", "size": item["Size"], "type": "file"} for item in page]

    def _remove(self, paths: Sequence[str], deadline_s: float) -> None:
        async def remove(path: str) -> None:
            try:
                await self._request("delete_object", **self._place(path))
            except FileNotFoundError as error:
                if error_code(error) == "NoSuchBucket":
                    raise

        async def remove_all() -> None:
            await asyncio.gather(*(remove(path) for path in paths))

        self._run(remove_all, deadline_s)

    def _abort(self, uploads: Sequence[tuple[str, str]], deadline_s: float) -> int:
        """Abort uploads, each a path and an id; returns how many were still there."""

        async def abort(path: str, upload_id: str) -> int:
            try:
                await self._request("abort_multipart_upload", **self._place(path), UploadId=upload_id)
            except FileNotFoundError:
                return 0
            return 1

        async def abort_all(batch: Sequence[tuple[str, str]]) -> int:
            return sum(await asyncio.gather(*(abort(*upload) for upload in batch)))

        batches = [uploads[start : start + _PARALLEL] for start in range(0, len(uploads), _PARALLEL)]
        return sum(self._run(lambda b=batch: abort_all(b), deadline_s) for batch in batches)  # type: ignore[misc]

    def _is_idle(self, path: str, upload_id: str, older_than_s: float, deadline_s: float) -> bool:
        """Whether no part came lately: an old upload may be one that another process is just going on with."""
        if older_than_s <= 0:
            return True
        try:
            page = self._run(lambda: self._request("list_parts", **self._place(path), UploadId=upload_id), deadline_s)
        except OSError as error:
            if is_unsupported(error) or isinstance(error, FileNotFoundError):
                return True
            raise
        return all(_age_s(part.get("LastModified")) >= older_than_s for part in page.get("Parts") or [])


def _client_settings(config: StoreConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        # Some servers refuse checksum trailers and some store them as data; our digests cover both ways.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "connect_timeout": _CONNECT_DEADLINE_S,
        "read_timeout": _NO_DEADLINE_S,  # every request has a deadline of ours, and it scales with the bytes
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "max_pool_connections": 2 * _PARALLEL,
    }
    if config.addressing != "auto":
        settings["s3"] = {"addressing_style": config.addressing}
    return settings


def _age_s(moment: Any) -> float:
    """Seconds since ``moment`` as a server told it; nothing told, or a moment that is still to come, is just now."""
    if not isinstance(moment, datetime):
        return 0.0
    # Servers tell whole seconds, some rounded up, and by clocks of their own.
    return max(0.0, (datetime.now(UTC) - (moment if moment.tzinfo else moment.replace(tzinfo=UTC))).total_seconds())
