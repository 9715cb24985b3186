"""What every ObjectStore must do. A test module subclasses the suite and provides the `store` fixture."""

from __future__ import annotations

import threading

import pytest

from storage.errors import ObjectExists, ObjectMissing, StorageError, StoreUnavailable
from storage.object_store import ObjectEntry, ObjectStore


class ObjectStoreConformance:
    """Collected only through its subclasses. ``creates_are_atomic``: of racing creates exactly one wins."""

    creates_are_atomic = True

    def test_what_was_put_is_read_back(self, store: ObjectStore) -> None:
        store.put("a/b.bin", b"hello")
        assert store.get("a/b.bin") == b"hello"

    def test_a_memoryview_is_stored_as_its_bytes(self, store: ObjectStore) -> None:
        store.put("view", memoryview(bytearray(b"0123456789"))[2:6])
        assert store.get("view") == b"2345"

    def test_an_empty_object_is_an_object(self, store: ObjectStore) -> None:
        store.put("empty", b"")
        assert store.get("empty") == b""
        assert store.list("") == [ObjectEntry(key="empty", size=0)]

    def test_put_replaces_the_older_object(self, store: ObjectStore) -> None:
        store.put("k", b"old, and longer")
        store.put("k", b"new")
        assert store.get("k") == b"new"

    def test_create_refuses_an_existing_name_and_keeps_its_content(self, store: ObjectStore) -> None:
        store.create("commits/one.json", b"first")
        with pytest.raises(ObjectExists) as caught:
            store.create("commits/one.json", b"second")
        assert caught.value.key == "commits/one.json"
        assert store.get("commits/one.json") == b"first"

    def test_of_racing_creates_one_wins(self, store: ObjectStore) -> None:
        if not self.creates_are_atomic:
            pytest.skip("create-only writes are no more than a guard here")
        outcomes: list[int] = []

        def create(number: int) -> None:
            try:
                store.create("race", str(number).encode())
            except ObjectExists:
                return
            outcomes.append(number)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert len(outcomes) == 1
        assert store.get("race") == str(outcomes[0]).encode()

    def test_a_missing_object_is_named(self, store: ObjectStore) -> None:
        with pytest.raises(ObjectMissing, match="not/there"):
            store.get("not/there")
        with pytest.raises(ObjectMissing, match="not/there"):
            store.get_range("not/there", 0, 4)

    def test_a_range_is_exactly_the_bytes_asked_for(self, store: ObjectStore) -> None:
        store.put("range", bytes(range(100)))
        assert store.get_range("range", 10, 5) == bytes(range(10, 15))
        assert store.get_range("range", 99, 1) == b"\x63"
        assert store.get_range("range", 0, 0) == b""

    @pytest.mark.parametrize(("offset", "length"), [(90, 11), (100, 1), (5000, 8)])
    def test_a_short_read_is_an_error_not_short_data(self, store: ObjectStore, offset: int, length: int) -> None:
        store.put("short", bytes(100))
        with pytest.raises(StoreUnavailable, match="short"):
            store.get_range("short", offset, length)

    def test_a_listing_is_sorted_complete_and_has_sizes(self, store: ObjectStore) -> None:
        for key, size in (("s/b/2", 2), ("s/a/1", 1), ("s/c", 3), ("other/x", 9)):
            store.put(key, bytes(size))
        assert store.list("s/") == [
            ObjectEntry(key="s/a/1", size=1),
            ObjectEntry(key="s/b/2", size=2),
            ObjectEntry(key="s/c", size=3),
        ]

    def test_an_empty_listing_is_no_error(self, store: ObjectStore) -> None:
        assert store.list("nothing/here/") == []
        assert store.list("") == []

    def test_a_folder_is_not_confused_with_a_longer_name(self, store: ObjectStore) -> None:
        store.put("step-1/x", b"1")
        store.put("step-10/x", b"2")
        assert [entry.key for entry in store.list("step-1/")] == ["step-1/x"]

    def test_a_listing_is_never_stale(self, store: ObjectStore) -> None:
        assert store.list("commits/") == []
        store.put("commits/1", b"x")
        assert [entry.key for entry in store.list("commits/")] == ["commits/1"]
        store.put("commits/1", b"longer")
        assert store.list("commits/") == [ObjectEntry(key="commits/1", size=6)]
        store.delete(["commits/1"])
        assert store.list("commits/") == []

    def test_delete_removes_only_what_it_names(self, store: ObjectStore) -> None:
        for number in range(20):
            store.put(f"d/{number}", b"x")
        store.delete([f"d/{number}" for number in range(19)])
        assert [entry.key for entry in store.list("d/")] == ["d/19"]

    def test_deleting_what_is_gone_is_no_error(self, store: ObjectStore) -> None:
        store.delete(["never/was"])
        store.delete([])

    def test_the_url_is_told(self, store: ObjectStore) -> None:
        assert "://" in store.url

    @pytest.mark.parametrize("key", ["/etc/passwd", "../outside", "a/../../outside", "a//b", "./a", "a\0b"])
    def test_a_key_cannot_leave_the_store(self, store: ObjectStore, key: str) -> None:
        for call in (
            lambda: store.put(key, b"x"),
            lambda: store.create(key, b"x"),
            lambda: store.get(key),
            lambda: store.get_range(key, 0, 1),
            lambda: store.list(key),
        ):
            with pytest.raises(StorageError, match="outside"):
                call()

    @pytest.mark.parametrize("key", ["größe", "tab\there", "back\\slash", "", "folder/", "k" * 1000])
    def test_a_name_that_not_every_store_keeps_is_refused(self, store: ObjectStore, key: str) -> None:
        with pytest.raises(StorageError, match="key"):
            store.put(key, b"x")
        with pytest.raises(StorageError, match="key"):
            store.create(key, b"x")
        assert store.list("") == []

    @pytest.mark.parametrize("key", ["a b+c=d&e", "per%20cent", "q?x=1#y", "star*[0]"])
    def test_a_name_of_unusual_characters_is_kept_as_it_is(self, store: ObjectStore, key: str) -> None:
        store.put(f"odd/{key}", b"x")
        assert store.list("odd/") == [ObjectEntry(key=f"odd/{key}", size=1)]
        assert store.get(f"odd/{key}") == b"x"
        store.delete([f"odd/{key}"])
        assert store.list("odd/") == []

    def test_a_prefix_need_not_be_a_whole_name(self, store: ObjectStore) -> None:
        for key in ("s/step-1/a", "s/step-12/b", "s/step-2/c", "s/step-1"[:-1] + "x"):
            store.put(key, b"x")
        assert [entry.key for entry in store.list("s/step-1")] == ["s/step-1/a", "s/step-12/b"]

    def test_aborting_uploads_touches_no_object(self, store: ObjectStore) -> None:
        store.put("u/one", b"1")
        assert store.abort_uploads("u/", older_than_s=0.0) == 0
        assert store.abort_uploads("never/was/", older_than_s=0.0) == 0
        assert store.get("u/one") == b"1"
