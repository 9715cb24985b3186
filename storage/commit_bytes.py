"""A Commit to bytes and back. The bytes end with a digest of all before it, so that no flipped bit goes unseen.

Nothing else vouches for a Commit: of Manifest and Shards the record above holds the digest. Commits without one are
of the first format and are read as they are.
"""

from __future__ import annotations

from typing import Final

from storage.codec import digest128
from storage.manifest import Commit

__all__ = ["commit_from_bytes", "commit_to_bytes"]

_BEFORE: Final = b',"digest":"'
_AFTER: Final = b'"}'
_DIGEST_BYTES: Final = 32
_TAIL_BYTES: Final = len(_BEFORE) + _DIGEST_BYTES + len(_AFTER)


def commit_to_bytes(commit: Commit) -> bytes:
    """One JSON object: the Commit's members, then ``digest``, the xxh3_128 of the object without it."""
    body = commit.model_dump_json().encode()
    return body[:-1] + _BEFORE + digest128(body).encode() + _AFTER


def commit_from_bytes(content: bytes) -> Commit:
    """The inverse of `commit_to_bytes`. Raises ValueError for anything else than a whole Commit."""
    tail = content[-_TAIL_BYTES:]
    if not tail.startswith(_BEFORE):
        return Commit.model_validate_json(content)
    body = content[:-_TAIL_BYTES] + b"}"
    stated, found = tail[len(_BEFORE) : -len(_AFTER)].decode(errors="replace"), digest128(body)
    if stated != found or not tail.endswith(_AFTER):
        raise ValueError(f"a Commit with the digest {found}, stated {stated}")
    return Commit.model_validate_json(body)
