"""Reading rows back by range, refusing bad ids. Real Parquet and Arrow files, in folders and in memory."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from storage.memory_store import MemoryStore
from storage.open_store import open_store
from tests.fakes.token_datasets import write_numbered_rows
from workers.data_errors import DataError
from workers.dataset import TokenDataset
from workers.dataset_card import (
    CARD_KEY,
    DataFormat,
    SourceSummary,
    load_card,
)
from workers.dataset_writer import DatasetWriter


def replace_tokens(folder: Path, name: str, rows: np.ndarray, row_group_rows: int = 4) -> None:
    """Another writer's file in the place of ours, with the card's size made to fit."""
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
    pq.write_table(pa.table({"tokens": tokens}), folder / name, row_group_size=row_group_rows)
    card = json.loads((folder / CARD_KEY).read_text())
    for file in card["files"]:
        if file["name"] == name:
            file["size"] = (folder / name).stat().st_size
    (folder / CARD_KEY).write_text(json.dumps(card))


@pytest.mark.parametrize("data_format", ["parquet", "arrow"])
@pytest.mark.parametrize("url", ["memory://read", "folder"])
def test_rows_come_in_the_order_asked_across_files_and_row_groups(
    tmp_path: Path, url: str, data_format: DataFormat
) -> None:
    url = str(tmp_path / "data") if url == "folder" else f"{url}-{data_format}"
    write_numbered_rows(url, 19, validation_rows=3, data_format=data_format)
    dataset = TokenDataset.open(url, "train")
    asked = [18, 0, 7, 8, 7, 11, 3]
    rows = dataset.rows(asked)
    assert rows.dtype == np.int64
    assert rows.tolist() == [[row] * 5 for row in asked]
    assert dataset.num_rows == 19
    assert TokenDataset.open(url, "validation").rows([0, 1, 2])[:, 0].tolist() == [19, 20, 21]


@pytest.mark.parametrize("data_format", ["parquet", "arrow"])
def test_reading_rows_imports_no_pandas(tmp_path: Path, data_format: DataFormat) -> None:
    """Its import would fall into a World's first step, and every collection of garbage after it would be longer."""
    write_numbered_rows(str(tmp_path), 10, data_format=data_format)
    read = f"TokenDataset.open({str(tmp_path)!r}, 'train').rows([3, 9])"
    code = f"import sys; from workers.dataset import TokenDataset; {read}; print('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_a_pickled_copy_reads_the_same(tmp_path: Path) -> None:
    write_numbered_rows(str(tmp_path), 10)
    dataset = TokenDataset.open(str(tmp_path), "train")
    dataset.rows([3])
    assert pickle.loads(pickle.dumps(dataset)).rows([9])[0].tolist() == [9] * 5


@pytest.mark.parametrize("data_format", ["parquet", "arrow"])
def test_memory_holds_a_few_row_groups_and_open_files_however_many_are_read(
    data_format: DataFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.dataset.OPEN_FOOTERS_KIB", 7)
    url = f"memory://bounded-{data_format}"
    write_numbered_rows(url, 200, data_format=data_format)
    dataset = TokenDataset(url, load_card(open_store(url)), "train", cached_row_groups=3)
    order = np.random.default_rng(0).permutation(200)
    assert dataset.rows(order)[:, 0].tolist() == order.tolist()
    assert dataset.cached_bytes == 3 * 4 * 5 * 2  # three row groups of four rows of five uint16
    assert all(tokens.base is None or tokens.base.nbytes == tokens.nbytes for tokens in dataset._row_groups.values())
    assert len(dataset._open) == {"parquet": 3, "arrow": 7}[data_format]  # of 25 files of two row groups


def test_a_row_group_is_fetched_once_while_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    write_numbered_rows("memory://fetched-once", 16)
    dataset = TokenDataset.open("memory://fetched-once", "train")
    dataset.rows([0])
    read: list[object] = []
    monkeypatch.setattr(dataset, "_read", lambda *place: read.append(place))
    assert dataset.rows([1, 2, 3]).shape == (3, 5)
    assert read == []


@pytest.mark.parametrize("ids", [[-1], [12], [0, 99]])
def test_a_row_that_does_not_exist_is_refused(ids: list[int]) -> None:
    write_numbered_rows(f"memory://rows{ids}", 12)
    with pytest.raises(DataError, match="split of 12 rows"):
        TokenDataset.open(f"memory://rows{ids}", "train").rows(ids)


@pytest.mark.parametrize(("bad", "dtype"), [(16, "uint16"), (70_000, "uint32"), (-1, "int32")])
def test_the_reader_fails_at_a_bad_id_with_file_row_group_and_value(  # case B51
    tmp_path: Path, bad: int, dtype: str
) -> None:
    write_numbered_rows(str(tmp_path), 16)
    rows = np.repeat(np.arange(8, 16, dtype=dtype)[:, None], 5, axis=1)
    rows[6, 2] = bad
    replace_tokens(tmp_path, "train-00001.parquet", rows)
    dataset = TokenDataset.open(str(tmp_path), "train")
    assert dataset.rows([8])[0, 0] == 8
    with pytest.raises(
        DataError, match=rf"train-00001\.parquet, row group 1, row 6: token id {bad} at place 2"
    ) as caught:
        dataset.rows([13])
    assert (caught.value.file, caught.value.row_group) == ("train-00001.parquet", 1)


@pytest.mark.parametrize("data_format", ["parquet", "arrow"])
def test_id_512_of_a_vocabulary_of_512_is_named_in_both_formats(  # case B51
    tmp_path: Path, data_format: DataFormat
) -> None:
    """The card is a lie: it was written for a vocabulary one larger."""
    write_numbered_rows(str(tmp_path), 8, first_token=505, data_format=data_format)
    card = json.loads((tmp_path / CARD_KEY).read_text())
    (tmp_path / CARD_KEY).write_text(json.dumps(card | {"vocab_size": 512}))
    dataset = TokenDataset.open(str(tmp_path), "train")
    assert dataset.rows([0])[0, 0] == 505
    with pytest.raises(DataError, match=rf"train-00000\.{data_format}, row group 1, row 7: token id 512 at place 0"):
        dataset.rows([7])


def test_any_bit_flipped_in_the_tokens_is_noticed_by_the_page_checksum(tmp_path: Path) -> None:
    """Without the checksum some of these decode to other tokens within the vocabulary."""
    writer = DatasetWriter(open_store(str(tmp_path)), sequence_length=63, vocab_size=1 << 16)
    writer.append_rows(np.random.default_rng(0).integers(0, 1 << 16, (2, 64)))
    writer.finish(tokenizer=b"{}", source=SourceSummary(description="", num_documents=1, num_bytes=1))
    path = tmp_path / "train-00000.parquet"
    whole = path.read_bytes()
    chunk = pq.read_metadata(path).row_group(0).column(0)
    end = chunk.data_page_offset + chunk.total_compressed_size
    for place in range(end - 200, end, 5):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        path.write_bytes(bytes(damaged))
        with pytest.raises(DataError, match=r"train-00000\.parquet, row group 0: not readable"):
            TokenDataset.open(str(tmp_path), "train").rows([0])


def test_any_bit_flipped_in_an_arrow_file_is_noticed_with_file_and_batch(tmp_path: Path) -> None:
    """Arrow has no checksums of its own. What is not noticed may only be padding, which changes no token."""
    write_numbered_rows(str(tmp_path), 24, data_format="arrow", row_group_rows=12, sequence_length=31)
    path = tmp_path / "train-00000.arrow"
    whole = path.read_bytes()
    found = 0
    for place in range(0, len(whole), 11):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(bytes(damaged))
        dataset = TokenDataset.open(str(tmp_path), "train")
        for batch in range(2):
            try:
                rows = dataset.rows(range(12 * batch, 12 * batch + 12))
            except DataError as error:
                found += (error.file, error.row_group) == ("train-00000.arrow", batch)
            else:
                assert rows.tolist() == [[row] * 32 for row in range(12 * batch, 12 * batch + 12)]
    assert found > 24 * 32 * 2 // 11  # every flip in the tokens, and more


def test_a_flipped_bit_of_a_token_names_the_arrow_file_and_the_batch(tmp_path: Path) -> None:
    write_numbered_rows(str(tmp_path), 24, data_format="arrow", row_group_rows=12, sequence_length=31)
    path = tmp_path / "train-00000.arrow"
    tokens = np.repeat(np.arange(12, 24, dtype="<u2"), 32).tobytes()
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(tokens) + 100] ^= 1
    path.write_bytes(bytes(damaged))
    dataset = TokenDataset.open(str(tmp_path), "train")
    assert dataset.rows([0])[0, 0] == 0
    with pytest.raises(DataError, match=r"train-00000\.arrow, row group 1: not readable: record batch 1 has digest"):
        dataset.rows([12])


def test_batches_of_an_arrow_file_that_changed_places_are_refused(tmp_path: Path) -> None:
    write_numbered_rows(str(tmp_path), 8, data_format="arrow")
    path = tmp_path / "train-00000.arrow"
    with pa.ipc.open_file(path.read_bytes()) as reader:
        found = [reader.get_batch_with_custom_metadata(number) for number in (1, 0)]
        schema = reader.schema
    with pa.ipc.new_file(str(path), schema) as writer:
        for one in found:
            writer.write_batch(one.batch, custom_metadata=one.custom_metadata)
    with pytest.raises(DataError, match=r"row group 0: not readable: record batch 0 has digest"):
        TokenDataset.open(str(tmp_path), "train").rows([0])


@pytest.mark.parametrize("data_format", ["parquet", "arrow"])
def test_one_request_reads_one_row_group_and_nothing_else(
    data_format: DataFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://requests-{data_format}"
    card = write_numbered_rows(url, 64, data_format=data_format, row_group_rows=32, sequence_length=255)
    dataset = TokenDataset.open(url, "train")
    dataset.rows([0])
    asked: list[int] = []
    get_range = MemoryStore.get_range

    def counted(store: MemoryStore, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
        asked.append(length)
        return get_range(store, key, offset, length, deadline_s=deadline_s)

    monkeypatch.setattr(MemoryStore, "get_range", counted)
    dataset.rows([32, 50, 63])
    assert len(asked) == 1
    assert asked[0] < card.files[0].size * 0.6


@pytest.mark.parametrize("data_format", ["parquet", "arrow"])
def test_row_groups_of_a_remote_store_are_fetched_beside_each_other(
    data_format: DataFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read waits until three are under way, of one file and of several."""
    url = f"memory://at-once-{data_format}"
    write_numbered_rows(url, 24, data_format=data_format)
    dataset = TokenDataset(url, load_card(open_store(url)), "train", cached_row_groups=2, reads_at_once=3)
    assert dataset.rows([0, 8, 16])[:, 0].tolist() == [0, 8, 16]
    all_under_way, get_range = threading.Barrier(3), MemoryStore.get_range

    def together(store: MemoryStore, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
        all_under_way.wait(30.0)
        return get_range(store, key, offset, length, deadline_s=deadline_s)

    monkeypatch.setattr(MemoryStore, "get_range", together)
    assert dataset.rows([7, 4, 12, 20])[:, 0].tolist() == [7, 4, 12, 20]
    assert dataset.rows([3, 8, 17, 1])[:, 0].tolist() == [3, 8, 17, 1]
    assert dataset.cached_bytes == 2 * 4 * 5 * 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data-read_")]


def test_of_several_reads_at_once_the_first_error_is_raised() -> None:
    url = "memory://at-once-error"
    write_numbered_rows(url, 24)
    dataset = TokenDataset(url, load_card(open_store(url)), "train", reads_at_once=3)
    open_store(url).delete(["train-00001.parquet", "train-00002.parquet"])
    with pytest.raises(DataError, match=r"train-00001\.parquet: the file is missing"):
        dataset.rows([0, 8, 16])


def test_only_a_remote_store_is_read_with_several_threads() -> None:
    card = write_numbered_rows("memory://threads-of-a-url", 8)
    urls = ("s3://b/x", "gs://b/x", "/tmp/x", "file:///tmp/x", "memory://x")
    assert [TokenDataset(url, card, "train")._reads_at_once for url in urls] == [8, 8, 1, 1, 1]


def test_a_file_with_other_rows_than_the_card_says_is_refused(tmp_path: Path) -> None:
    write_numbered_rows(str(tmp_path), 16)
    replace_tokens(tmp_path, "train-00001.parquet", np.zeros((7, 5), dtype=np.uint16))
    with pytest.raises(DataError, match=r"train-00001\.parquet: holds 7 rows .* card says 8"):
        TokenDataset.open(str(tmp_path), "train").rows([8])


def test_rows_of_another_length_than_the_card_says_are_refused(tmp_path: Path) -> None:
    write_numbered_rows(str(tmp_path), 8)
    replace_tokens(tmp_path, "train-00000.parquet", np.zeros((8, 6), dtype=np.uint16))
    with pytest.raises(DataError, match=r"holds 24 values of type uint16; expected 4 rows of 5"):
        TokenDataset.open(str(tmp_path), "train").rows([0])


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    write_numbered_rows(str(tmp_path), 8)
    (tmp_path / "train-00000.parquet").unlink()
    with pytest.raises(DataError, match=r"train-00000\.parquet: the file is missing"):
        TokenDataset.open(str(tmp_path), "train").rows([0])


def test_a_damaged_card_is_refused_with_the_place(tmp_path: Path) -> None:
    write_numbered_rows(str(tmp_path), 8)
    card = json.loads((tmp_path / CARD_KEY).read_text())
    (tmp_path / CARD_KEY).write_text(json.dumps(card | {"num_train_rows": 9}))
    with pytest.raises(DataError, match=r"dataset\.json: .*train files hold 8 rows, the card says 9"):
        TokenDataset.open(str(tmp_path), "train")
