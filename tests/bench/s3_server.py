"""A real S3 server for a bench, on this machine: one bucket, and the environment that points every client at it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3

from tests.servers.swift_server import SwiftServer

__all__ = ["swift_bucket"]


@contextmanager
def swift_bucket(scratch: Path) -> Iterator[str]:
    """Endpoint of a server with the empty bucket ``bench``; the environment keeps pointing there."""
    directory = scratch / "swift"
    directory.mkdir()
    swift = SwiftServer(directory).start()
    try:
        keys = {"aws_access_key_id": swift.access_key, "aws_secret_access_key": swift.secret_key}
        boto3.client("s3", endpoint_url=swift.endpoint, region_name="us-east-1", **keys).create_bucket(Bucket="bench")
        os.environ.update({name.upper(): key for name, key in keys.items()})
        os.environ.update({"AWS_ENDPOINT_URL": swift.endpoint, "AWS_DEFAULT_REGION": "us-east-1"})
        yield swift.endpoint
    finally:
        swift.stop()
