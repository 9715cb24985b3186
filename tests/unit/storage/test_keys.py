"""Object names: what is ours parses back to itself, what only looks like it is not ours."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.keys import (
    COMMITS,
    MANIFESTS,
    Attempt,
    RecordKey,
    StepKey,
    commit_key,
    manifest_key,
    parse_record_key,
    parse_shard_key,
    parse_step_key,
    quarantine_key,
    shard_key,
)

NONCES = st.text("0123456789abcdef", min_size=8, max_size=8)
STEP_KEYS = st.builds(
    StepKey,
    step=st.integers(0, 9_999_999_999),
    attempt=st.builds(Attempt, number=st.integers(0, 999_999), nonce=NONCES),
)


@settings(deadline=None)
@given(key=STEP_KEYS, writer=st.none() | NONCES, rank=st.integers(0, 1_000_000))
def test_every_name_of_ours_parses_back(key: StepKey, writer: str | None, rank: int) -> None:
    record = RecordKey(step_key=key, writer=writer)
    assert parse_record_key(commit_key(key, writer), COMMITS) == record
    assert parse_record_key(manifest_key(key, writer), MANIFESTS) == record
    assert parse_record_key(commit_key(key, writer), MANIFESTS) is None
    assert parse_step_key(quarantine_key(key)) == key
    assert parse_shard_key(shard_key(key, rank)) == (key, rank)


def test_names_are_as_documented() -> None:
    key = StepKey(step=40, attempt=Attempt(number=3, nonce="9f2c11d0"))
    assert commit_key(key) == "commits/step-0000000040.a000003-9f2c11d0.json"
    assert commit_key(key, "1b2c3d4e") == "commits/step-0000000040.a000003-9f2c11d0.w1b2c3d4e.json"


@pytest.mark.parametrize(
    "name",
    [
        "commits/copy of step-0000000040.a000003-9f2c11d0.json",
        "commits/old/step-0000000040.a000003-9f2c11d0.json",
        "commits/step-0000000040.a000003-9f2c11d0.json.tmp",
        "commits/step-0000000040.a000003-9f2c11d0.w1b2c3d4.json",
        "commits/step-0000000040.a000003-9f2c11d0.W1B2C3D4E.json",
        "commits/step-0000000040.a000003-9f2c11d0.json\n",
        "commits/step-40.a3-9f2c11d0.json",
        "commits/step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0664\u0660.a000003-9f2c11d0.json",
    ],
)
def test_lookalikes_of_records_are_not_ours(name: str) -> None:
    assert parse_record_key(name, COMMITS) is None


@pytest.mark.parametrize(
    "name",
    [
        "shards/step-0000000040/a000003-9f2c11d0/rank-0007.shard",
        "shards/step-0000000040/a000003-9f2c11d0/rank-000007.shard",
        "shards/step-0000000040/a000003-9f2c11d0/rank-00007.shard.bak",
        "shards/step-0000000040/a000003-9f2c11d0/sub/rank-00007.shard",
        "old/shards/step-0000000040/a000003-9f2c11d0/rank-00007.shard",
        "shards/step-0000000040/rank-00007.shard",
    ],
)
def test_lookalikes_of_shards_are_not_ours(name: str) -> None:
    assert parse_shard_key(name) is None
