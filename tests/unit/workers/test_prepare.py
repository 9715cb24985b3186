"""Preparing datasets from small real sources into folders and the in-memory store."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from storage.open_store import open_store
from workers.data_errors import DataError
from workers.dataset import TokenDataset
from workers.dataset_card import CARD_KEY, TOKENIZER_KEY, DatasetCard, SourceSummary, load_card
from workers.dataset_writer import DatasetWriter
from workers.prepare import prepare_dataset
from workers.prepare_sources import PIECE_BYTES, find_source

SENTENCE = "def answer(question):\n    return 'forty-two ways to write a test'\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for folder in ("", "a", "b", ".git", "__pycache__"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "b" / "two.py").write_text(SENTENCE * 40)
    (root / "a" / "one.md").write_text("# Grüße aus Köln\n" * 50)
    (root / "empty.py").write_text("")
    (root / "image.txt").write_bytes(b"\x00\x01\x02")
    (root / ".git" / "config.txt").write_text("secret")
    (root / "__pycache__" / "x.py").write_text("secret")
    (root / "a" / "notes.bin").write_bytes(b"secret")
    return root


def prepare(source: Path | str, url: str, **changes: object) -> DatasetCard:
    settings: dict[str, object] = {"sequence_length": 16, "vocab_size": 300, "validation_fraction": 0.1} | changes
    return prepare_dataset(str(source), url, **settings)  # type: ignore[arg-type]


def all_tokens(url: str, split: str = "train") -> np.ndarray:
    dataset = TokenDataset.open(url, split)  # type: ignore[arg-type]
    return dataset.rows(range(dataset.num_rows))


def test_the_text_of_a_tree_comes_back_in_path_order_with_documents_separated(tree: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "data")
    card = prepare(tree, url, validation_fraction=0.0)
    rows = all_tokens(url)
    stream = np.concatenate([rows[:, :-1].reshape(-1), rows[-1, -1:]])
    tokenizer = Tokenizer.from_str(open_store(url).get(TOKENIZER_KEY).decode())
    one, two = (tokenizer.decode(part.tolist()) for part in np.split(stream, np.flatnonzero(stream == 0))[:2])
    assert one == "# Grüße aus Köln\n" * 50
    assert (SENTENCE * 40).startswith(two)
    assert len(two) > len(SENTENCE) * 38
    assert card.source.num_documents == 2


def test_each_row_begins_with_the_last_token_of_the_row_before(tree: Path, tmp_path: Path) -> None:
    prepare(tree, str(tmp_path / "data"), validation_fraction=0.0)
    rows = all_tokens(str(tmp_path / "data"))
    assert rows.shape[1] == 17
    assert np.array_equal(rows[1:, 0], rows[:-1, -1])


def test_two_prepares_in_two_processes_give_the_same_fingerprint(tree: Path, tmp_path: Path) -> None:
    here = prepare(tree, str(tmp_path / "first"))
    code = (
        "import sys; from workers.prepare import prepare_dataset as p; "
        "print(p(sys.argv[1], sys.argv[2], sequence_length=16, vocab_size=300, validation_fraction=0.1).fingerprint);"
        "assert not {'torch', 'ray'} & set(sys.modules), 'the driver may not load torch or ray here'"
    )
    command = [sys.executable, "-c", code, str(tree), str(tmp_path / "second")]
    there = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert there.stdout.strip() == here.fingerprint


@pytest.mark.parametrize("change", ["text", "name", "sequence_length", "vocab_size"])
def test_any_change_of_text_names_or_packing_changes_the_fingerprint(tree: Path, tmp_path: Path, change: str) -> None:
    before = prepare(tree, str(tmp_path / "before"))
    changes: dict[str, object] = {}
    match change:
        case "text":
            (tree / "b" / "two.py").write_text(SENTENCE.replace("two", "six") * 40)
        case "name":
            (tree / "b" / "two.py").rename(tree / "a" / "0.py")
        case "sequence_length":
            changes = {"sequence_length": 15}
        case _:
            changes = {"vocab_size": 290}
    assert prepare(tree, str(tmp_path / "after"), **changes).fingerprint != before.fingerprint


def test_prepare_works_on_the_memory_store_and_reports_progress_to_the_end(tree: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    card = prepare(tree, "memory://prepare-progress", progress=lambda *news: seen.append(news))
    assert load_card(open_store("memory://prepare-progress")) == card
    assert {stage for stage, _, _ in seen} == {"tokenizer", "encode"}
    stage, done, total = seen[-1]
    assert (stage, done) == ("encode", total)


def test_the_card_is_the_last_object_written(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://prepare-last"
    store = open_store(url)
    order: list[str] = []
    put = type(store).put

    def recording(self: object, key: str, data: bytes, **limits: float) -> None:
        order.append(key)
        put(self, key, data, **limits)  # type: ignore[arg-type]

    monkeypatch.setattr(type(store), "put", recording)
    prepare(tree, url)
    assert order[-1] == CARD_KEY
    assert order.count(CARD_KEY) == 1
    assert TOKENIZER_KEY in order[:-1]


def test_a_folder_without_a_card_is_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "train-00000.parquet").write_bytes(b"left over")
    with pytest.raises(DataError, match=r"holds no dataset.*raysume data prepare"):
        TokenDataset.open(str(tmp_path), "train")


def test_an_existing_dataset_is_not_overwritten(tree: Path, tmp_path: Path) -> None:
    prepare(tree, str(tmp_path / "data"))
    seen: list[object] = []
    with pytest.raises(DataError, match="holds a dataset already"):
        prepare(tree, str(tmp_path / "data"), progress=lambda *news: seen.append(news))
    assert seen == [], "found out before any work"


@pytest.mark.parametrize("name", ["passwd", "dataset.json.bak", "train-00000.parquet.old", "sub/train-00000.parquet"])
def test_a_place_with_other_files_is_refused_before_anything_is_written(tree: Path, tmp_path: Path, name: str) -> None:
    place = tmp_path / "data"
    (place / name).parent.mkdir(parents=True)
    (place / name).write_text("mine")
    with pytest.raises(DataError, match=rf"no dataset: {name}; choose an empty place"):
        prepare(tree, str(place))
    assert [path for path in place.rglob("*") if path.is_file()] == [place / name]


def test_what_an_interrupted_prepare_left_is_replaced(tree: Path, tmp_path: Path) -> None:
    place = tmp_path / "data"
    place.mkdir()
    for name in ("train-00000.parquet", "validation-00000.parquet", TOKENIZER_KEY):
        (place / name).write_bytes(b"cut off")
    assert prepare(tree, str(place)).fingerprint == prepare(tree, str(tmp_path / "fresh")).fingerprint


def test_jsonl_and_parquet_of_the_same_texts_give_the_same_rows(tmp_path: Path) -> None:
    texts = [SENTENCE * 20, "", "short", "ümläut " * 30]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in texts) + "\n\n")
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "text": texts}), tmp_path / "in.parquet")
    for kind in ("jsonl", "parquet"):
        prepare(tmp_path / f"in.{kind}", str(tmp_path / f"data-{kind}"))
    assert np.array_equal(all_tokens(str(tmp_path / "data-jsonl")), all_tokens(str(tmp_path / "data-parquet")))


def test_both_formats_hold_the_same_rows(tree: Path, tmp_path: Path) -> None:
    cards = [prepare(tree, str(tmp_path / kind), data_format=kind) for kind in ("parquet", "arrow")]
    assert np.array_equal(all_tokens(str(tmp_path / "parquet")), all_tokens(str(tmp_path / "arrow")))
    assert {file.name.rpartition(".")[2] for file in cards[1].files} == {"arrow"}
    assert cards[0].tokenizer_digest == cards[1].tokenizer_digest


@pytest.mark.parametrize("place", ["", f"/{TOKENIZER_KEY}"])
def test_a_second_dataset_can_take_the_tokenizer_of_the_first(tree: Path, tmp_path: Path, place: str) -> None:
    first = prepare(tree, str(tmp_path / "first"))
    (tmp_path / "other.txt").write_text("zebras graze quietly beyond the quarry\n" * 400)
    own = prepare(tmp_path / "other.txt", str(tmp_path / "own"))
    taken = prepare(tmp_path / "other.txt", str(tmp_path / "taken"), tokenizer_of=f"{tmp_path / 'first'}{place}")
    assert taken.tokenizer_digest == first.tokenizer_digest != own.tokenizer_digest
    assert taken.vocab_size == first.vocab_size


def test_a_tokenizer_that_is_missing_or_is_none_is_refused(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere is neither a dataset with a tokenizer\.json nor a tokenizer's file"):
        prepare(tree, str(tmp_path / "data"), tokenizer_of=str(tmp_path / "nowhere"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json: no tokenizer that can be read"):
        prepare(tree, str(tmp_path / "data"), tokenizer_of=str(tmp_path / "bad.json"))


def test_max_bytes_stops_the_reading(tree: Path, tmp_path: Path) -> None:
    card = prepare(tree, str(tmp_path / "data"), max_bytes=1500)
    assert card.source.num_bytes == 1500


@pytest.mark.parametrize("piece", [b"x" * 79 + b"\n", b"x" * 81, "ä€𝄞".encode()])
def test_a_text_larger_than_one_piece_is_read_whole_in_bounded_pieces(tmp_path: Path, piece: bytes) -> None:
    data = (piece * (2 * PIECE_BYTES // len(piece) + 2))[: -len(piece)] + piece
    (tmp_path / "big.txt").write_bytes(data)
    pieces = list(find_source(str(tmp_path / "big.txt")).pieces())
    assert "".join(part.text for part in pieces).encode() == data
    assert [part.is_last for part in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(part.num_bytes for part in pieces) <= 2 * PIECE_BYTES


def test_text_that_spells_the_end_of_text_mark_ends_no_document(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("before <|endoftext|> after\n" * 40)
    prepare(tmp_path / "in.txt", str(tmp_path / "data"), validation_fraction=0.0)
    assert np.count_nonzero(all_tokens(str(tmp_path / "data"))[:-1] == 0) == 0


@pytest.mark.parametrize(
    ("name", "data", "row", "reason"),
    [
        ("a.txt", b"fine\nalso fine\nbad \xff here\n", 3, "not valid UTF-8"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": \n', 2, "not a JSON object"),
        ("a.jsonl", b'{"text": "fine"}\n\n{"body": "x"}\n', 3, "string field 'text'"),
        ("a.jsonl", b'{"text": 7}\n', 1, "string field 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', 1, "lone surrogate"),
        ("a.parquet", b"PAR1 not really", None, "not readable as Parquet"),
    ],
)
def test_bad_input_names_file_row_and_reason(
    tmp_path: Path, name: str, data: bytes, row: int | None, reason: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError) as caught:
        prepare(tmp_path / name, str(tmp_path / "data"))
    assert (caught.value.file, caught.value.row) == (name, row)
    assert reason in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert not (tmp_path / "data" / CARD_KEY).exists()


def test_parquet_without_a_text_column_or_with_nulls_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "no.parquet")
    with pytest.raises(DataError, match=r"no\.parquet: no column 'text'; the columns are: body"):
        prepare(tmp_path / "no.parquet", str(tmp_path / "data"))
    pq.write_table(pa.table({"text": ["x", None]}), tmp_path / "null.parquet")
    with pytest.raises(DataError, match=r"null\.parquet, row 1: column 'text' holds NoneType"):
        prepare(tmp_path / "null.parquet", str(tmp_path / "data"))


@pytest.mark.parametrize(("source", "reason"), [("nowhere", "no such file"), (".", "no text, source code")])
def test_a_source_with_nothing_to_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=reason):
        prepare(source, "memory://nothing")


def test_text_too_short_for_one_row_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("short")
    with pytest.raises(DataError, match="no training row of 17 tokens; use more text or a smaller sequence length"):
        prepare(tmp_path / "in.txt", str(tmp_path / "data"))


def test_a_vocabulary_smaller_than_the_bytes_is_refused(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocabulary size is 200"):
        prepare(tree, str(tmp_path / "data"), vocab_size=200)


def test_the_standard_library_leaves_out_only_what_does_not_decode() -> None:
    source = find_source("stdlib")
    first = next(iter(source.pieces()))
    assert first.file.endswith(".py")
    assert source.num_bytes > 5_000_000
    assert not any("site-packages" in str(path) for path in source._files)


def writer_for(url: str, **changes: object) -> DatasetWriter:
    settings: dict[str, object] = {"sequence_length": 4, "vocab_size": 100_000} | changes
    return DatasetWriter(open_store(url), **settings)  # type: ignore[arg-type]


def test_the_writer_refuses_an_id_that_would_wrap_in_uint16() -> None:  # case B51
    with pytest.raises(DataError, match=r"token id 70000 is outside 0\.\.65535 .*stored as uint16"):
        writer_for("memory://wrap", dtype="uint16").append(np.array([1, 2, 70_000]))


@pytest.mark.parametrize("bad", [-1, 512])
def test_the_writer_refuses_an_id_outside_the_vocabulary(bad: int) -> None:
    with pytest.raises(DataError, match=f"token id {bad} is outside"):
        writer_for("memory://outside", vocab_size=512).append(np.array([0, bad]))


def test_ids_above_uint16_are_kept_in_a_wider_type_when_the_vocabulary_asks_for_it() -> None:
    writer = writer_for("memory://wide")
    writer.append(np.array([1, 70_000, 3, 4, 99_999]))
    card = writer.finish(tokenizer=b"{}", source=SourceSummary(description="", num_documents=1, num_bytes=1))
    assert card.dtype == "uint32"
    assert all_tokens("memory://wide").tolist() == [[1, 70_000, 3, 4, 99_999]]


def test_how_the_stream_is_handed_over_does_not_change_the_rows() -> None:
    stream = np.random.default_rng(0).integers(0, 500, 4 * 37 + 3)
    summary = SourceSummary(description="", num_documents=1, num_bytes=1)
    cards = []
    for url, cuts in (("memory://whole", []), ("memory://parts", [0, 1, 2, 9, 9, 80])):
        writer = writer_for(url, vocab_size=500, validation_fraction=0.2, row_group_rows=4, file_rows=8)
        for part in np.split(stream, cuts):
            writer.append(part)
        cards.append(writer.finish(tokenizer=b"{}", source=summary))
    assert cards[0] == cards[1]
    assert cards[0].num_train_rows + cards[0].num_validation_rows == 37
    assert cards[0].num_validation_rows in (7, 8)
    assert [file.rows for file in cards[0].files_of("train")][:-1] == [8] * (len(cards[0].files_of("train")) - 1)


def test_a_small_dataset_still_holds_out_one_row() -> None:
    writer = writer_for("memory://one-held-out", vocab_size=500, validation_fraction=1e-4)
    writer.append(np.arange(4 * 5 + 1))
    card = writer.finish(tokenizer=b"{}", source=SourceSummary(description="", num_documents=1, num_bytes=1))
    assert (card.num_train_rows, card.num_validation_rows) == (4, 1)
