"""What `learn_store` finds out, on stores in memory and on files that behave in one known way each."""

# ruff: noqa: ARG002 - deadlines belong to the interface
from __future__ import annotations

import json
from pathlib import Path

import pytest

from storage.config import StoreConfig
from storage.errors import StorageError, StoreUnavailable
from storage.local_store import LocalStore
from storage.memory_store import MemoryStore
from storage.object_store import ObjectEntry
from storage.open_store import open_store
from storage.retrying import RetryingStore
from storage.store_facts import learn_store


class _Quirky(MemoryStore):
    """``quirk`` names what this store does wrong."""

    def __init__(self, quirk: str) -> None:
        super().__init__(quirk)
        self._quirk = quirk
        self._gone: list[ObjectEntry] = []
        self.aborted: list[str] = []

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        if self._quirk == "ignores create":
            self.put(key, data)
        elif self._quirk == "fails create":
            raise StoreUnavailable("create", key, "injected")
        else:
            super().create(key, data)

    def get(self, key: str, *, deadline_s: float = 60.0) -> bytes:
        content = super().get(key)
        return content[:-1] if self._quirk == "cuts objects" else content

    def get_range(self, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
        return super().get_range(key, 0 if self._quirk == "ignores offsets" else offset, length)

    def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
        if self._quirk == "lists late":
            return []
        return super().list(prefix) + self._gone

    def delete(self, keys: object, *, deadline_s: float = 60.0) -> None:
        names = [str(key) for key in keys]  # type: ignore[attr-defined]
        if self._quirk == "lists what is gone":
            self._gone = [ObjectEntry(key=key, size=1) for key in names]
        super().delete(names)

    def abort_uploads(self, prefix: str, *, older_than_s: float, deadline_s: float = 60.0) -> int:
        self.aborted.append(prefix)
        return 0


def test_a_store_that_does_everything_right_is_found_to(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/run", StoreConfig(retries=0))
    facts = learn_store(store)
    assert (facts.create_on_put, facts.create_on_complete) == ("honoured", "not-applicable")
    assert {facts.exact_ranges, facts.fresh_after_put, facts.fresh_after_delete, facts.fresh_after_overwrite} == {"yes"}
    assert facts.clock_skew_s is not None
    assert abs(facts.clock_skew_s) < 60
    assert facts.reasons == {}
    assert json.loads(json.dumps(facts.as_json()))["create_on_put"] == "honoured"


@pytest.mark.parametrize(
    ("quirk", "fact", "value"),
    [
        ("ignores create", "create_on_put", "ignored"),
        ("fails create", "create_on_put", "unknown"),
        ("ignores offsets", "exact_ranges", "no"),
        ("lists late", "fresh_after_put", "no"),
        ("lists what is gone", "fresh_after_delete", "no"),
    ],
)
def test_each_thing_a_store_does_otherwise_is_found(quirk: str, fact: str, value: str) -> None:
    facts = learn_store(_Quirky(quirk))
    assert getattr(facts, fact) == value
    assert value in facts.text()
    if value == "unknown":
        assert "injected" in facts.reasons[fact]


def test_a_store_that_reads_back_other_bytes_is_an_error() -> None:
    with pytest.raises(StorageError, match="reads back other bytes"):
        learn_store(_Quirky("cuts objects"))


@pytest.mark.parametrize("quirk", ["none", "lists late", "fails create", "cuts objects"])
def test_a_probe_leaves_nothing_behind_and_touches_nothing_else(quirk: str) -> None:
    store = _Quirky(quirk)
    MemoryStore.put(store, "commits/1", b"kept")
    try:
        learn_store(store)
    except StorageError:
        assert quirk == "cuts objects"
    assert [entry.key for entry in MemoryStore.list(store, "")] == ["commits/1"]
    assert [prefix.startswith("probe/") for prefix in store.aborted] == [True]


def test_the_store_itself_is_asked_not_what_retries_make_of_it(tmp_path: Path) -> None:
    """A retried create may find its own object and pass; the fact must come from one request."""
    assert learn_store(RetryingStore(LocalStore(tmp_path), retries=3)).create_on_put == "honoured"
    assert list(tmp_path.iterdir()) == []
