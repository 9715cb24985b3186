"""S3 and servers that speak its protocol, through s3fs.

Multipart uploads are our own: parts grow with the object (a server takes 10,000), and an upload that fails or runs
into its deadline is aborted, so that it leaves no invisible parts behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Sequence
from typing import Any

from storage.config import StoreConfig
from storage.fsspec_store import FsspecStore

__all__ = ["S3Store", "part_bytes"]

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_MAX_PARTS = 10_000
_SMALLEST_PART = 16 * _MIB
_PARALLEL_PARTS = 4
_ABORT_DEADLINE_S = 10.0
_CONNECT_DEADLINE_S = 10.0


def part_bytes(size: int) -> int:
    """Size of one part of an object of ``size`` bytes: whole MiB, so many that 9,000 parts are enough."""
    needed = -(-size // (_MAX_PARTS - 1000))
    return max(_SMALLEST_PART, -(-needed // _MIB) * _MIB)


class S3Store(FsspecStore):
    """Objects below ``s3://bucket/prefix``. Credentials come from the environment or the machine's role."""

    def __init__(self, url: str, config: StoreConfig | None = None, *, multipart_bytes: int = 64 * _MIB) -> None:
        config = config or StoreConfig()
        self._multipart_bytes = multipart_bytes
        super().__init__(
            url,
            {
                "endpoint_url": config.endpoint_url or os.environ.get("AWS_ENDPOINT_URL"),
                "config_kwargs": {
                    # Some servers refuse checksum trailers and some store them as data; our digests cover both ways.
                    "request_checksum_calculation": "when_required",
                    "response_checksum_validation": "when_required",
                    "connect_timeout": _CONNECT_DEADLINE_S,
                    "read_timeout": config.deadline_s,
                    "retries": {"mode": "standard", "total_max_attempts": 2},
                },
            },
        )

    def _configure(self, filesystem: Any) -> None:
        filesystem.retries = 2  # per part; whole objects are retried by RetryingStore

    def _write(self, path: str, data: bytes | memoryview, deadline_s: float) -> None:
        view = memoryview(data).cast("B")
        if len(view) < self._multipart_bytes:
            super()._write(path, data, deadline_s)
            return
        self._run(lambda: self._multipart(path, view), deadline_s)

    def _read(self, path: str, deadline_s: float) -> bytes:
        # One request: with more than one, s3fs asks for the size first and then trusts it.
        content: bytes = self._call(deadline_s, "cat_file", path, max_concurrency=1)
        return content

    def _find(self, path: str, deadline_s: float) -> Sequence[dict[str, Any]]:
        # A missing bucket is an error here; only an empty answer of an existing one is an empty listing.
        found: Sequence[dict[str, Any]] = self._call(deadline_s, "lsdir", path, refresh=True, delimiter="")
        return found

    async def _multipart(self, path: str, view: memoryview) -> None:
        filesystem = self._filesystem()
        bucket, key, _ = filesystem.split_path(path)
        place = {"Bucket": bucket, "Key": key}
        upload = (await filesystem._call_s3("create_multipart_upload", **place))["UploadId"]
        try:
            parts = await self._upload_parts(filesystem, place | {"UploadId": upload}, view)
            await filesystem._call_s3(
                "complete_multipart_upload", **place, UploadId=upload, MultipartUpload={"Parts": [*parts]}
            )
        except BaseException:  # a deadline arrives as CancelledError, which is no Exception
            await _abort(filesystem, place | {"UploadId": upload})
            raise

    async def _upload_parts(
        self, filesystem: Any, upload: dict[str, str], view: memoryview
    ) -> Sequence[dict[str, Any]]:
        size = part_bytes(len(view))
        slots = asyncio.Semaphore(_PARALLEL_PARTS)

        async def send(number: int) -> dict[str, Any]:
            async with slots:
                body = bytes(view[(number - 1) * size : number * size])
                answer = await filesystem._call_s3("upload_part", **upload, PartNumber=number, Body=body)
            if not answer.get("ETag"):
                raise OSError(errno.EIO, f"part {number} was answered without an ETag")
            return {"PartNumber": number, "ETag": answer["ETag"]}

        sends = [asyncio.ensure_future(send(number)) for number in range(1, -(-len(view) // size) + 1)]
        try:
            return tuple(await asyncio.gather(*sends))
        finally:
            # No part may arrive after the abort: it would stay on the server for ever.
            for task in sends:
                task.cancel()
            await asyncio.gather(*sends, return_exceptions=True)


async def _abort(filesystem: Any, upload: dict[str, str]) -> None:
    try:
        with contextlib.suppress(FileNotFoundError):
            await asyncio.wait_for(filesystem._call_s3("abort_multipart_upload", **upload), _ABORT_DEADLINE_S)
    except (OSError, TimeoutError) as error:
        logger.warning("multipart upload of %s could not be aborted, parts may remain: %s", upload["Key"], error)
