"""Walks the pages of an S3 listing, also those of servers that know only the first version of the request.

A listing that does not move on is an error, never a listing that ends early: an object missing in it could be taken
for one that does not exist.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from storage.store_failures import is_unsupported

__all__ = ["list_objects"]

S3Call = Callable[..., Awaitable[dict[str, Any]]]


async def list_objects(call: S3Call, bucket: str, prefix: str) -> AsyncIterator[list[dict[str, Any]]]:
    """Every object whose key begins with ``prefix``, page by page."""
    place = {"Bucket": bucket, "Prefix": prefix}
    method, more = "list_objects_v2", dict[str, str]()
    last = ""
    while True:
        try:
            page = await call(method, **place, **more)
        except OSError as error:
            if method == "list_objects" or more or not is_unsupported(error):
                raise
            method = "list_objects"
            continue
        items = [item for item in page.get("Contents") or [] if item["Key"].startswith(prefix)]
        yield items
        if not page.get("IsTruncated"):
            return
        token = page.get("NextContinuationToken")
        newest = max((item["Key"] for item in page.get("Contents") or []), default=last)
        if newest <= last or (token is not None and token == more.get("ContinuationToken")):
            raise OSError(errno.EIO, f"the listing of {bucket}/{prefix} does not move on behind {last!r}")
        last = newest
        if token:
            more = {"ContinuationToken": token}
        else:  # the server answered as the first version does
            method, more = "list_objects", {"Marker": page.get("NextMarker") or newest}
