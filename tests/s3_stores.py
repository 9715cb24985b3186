"""S3 stores as the storage tests open them: small parts, quick retries, their own bucket."""

from __future__ import annotations

import uuid
from typing import Any

from storage.config import StoreConfig
from storage.retrying import RetryingStore
from storage.s3_store import S3Store

__all__ = ["PART", "new_bucket", "store_at"]

PART = 5 << 20


def store_at(endpoint: str, bucket: str, *, retries: int = 0, deadline_s: float = 20.0) -> RetryingStore:
    """A store whose objects go up in parts from ``PART`` bytes on."""
    config = StoreConfig(endpoint_url=endpoint, retries=retries, deadline_s=deadline_s, min_bytes_per_s=1e8)
    inner = S3Store(f"s3://{bucket}/run", config, multipart_bytes=PART)
    return RetryingStore(inner, retries=retries, deadline_s=deadline_s, first_delay_s=0.01, max_delay_s=0.05)


def new_bucket(client: Any) -> str:
    """Name of a new, empty bucket."""
    name = f"test-{uuid.uuid4().hex[:16]}"
    client.create_bucket(Bucket=name)
    return name
