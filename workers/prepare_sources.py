"""Turns a source (the standard library, a file, a folder of text, code, JSONL or Parquet) into a stream of documents.

Documents come in one fixed order, in pieces of bounded size, and can be read twice. Text is decoded strictly: input
that is not what it claims to be raises DataError with its file, row and reason. Nothing here knows tokens.
"""

from __future__ import annotations

import json
import logging
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from workers.data_errors import DataError

__all__ = ["TEXT_FIELD", "Piece", "Source", "find_source"]

logger = logging.getLogger(__name__)

TEXT_FIELD: Final = "text"
PIECE_BYTES: Final = 1 << 20
MAX_LINE_BYTES: Final = 256 << 20

_JSONL: Final = {".jsonl", ".ndjson"}
_PARQUET: Final = {".parquet"}
_TEXT_NAMES: Final = """
    txt text md rst tex html css xml json yaml yml toml ini cfg csv tsv sql proto cmake
    py pyi pyx ipynb c h cc cpp cxx hpp hh cu cuh m mm rs go java kt scala cs swift js jsx ts tsx vue rb php pl pm lua
    r jl hs ml mli ex exs erl clj el lisp f90 sh bash zsh ps1
"""
_TEXT: Final = {f".{name}" for name in _TEXT_NAMES.split()}
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_SKIPPED_FOLDERS: Final = {"__pycache__", "node_modules"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of one document; ``is_last``: the document ends here. ``file`` and ``row`` say where it came from."""

    text: str
    num_bytes: int
    is_last: bool
    file: str
    row: int | None = None


class Source:
    """The files of one source in their fixed order, and the documents in them."""

    def __init__(
        self, description: str, root: Path, files: tuple[Path, ...], *, skips_undecodable: bool = False
    ) -> None:
        self.description = description
        self.num_bytes = sum(file.stat().st_size for file in files)
        self._root, self._files = root, files
        self._skips_undecodable = skips_undecodable
        self._skipped: dict[str, None] = {}

    @property
    def skipped_files(self) -> tuple[str, ...]:
        """Files left out because they do not decode; only the standard library, which ships some, may have any."""
        return tuple(self._skipped)

    def pieces(self, max_bytes: int | None = None) -> Iterator[Piece]:
        """Every document in order, at most ``max_bytes`` of text in all (the last document is then cut short)."""
        left = max_bytes
        for piece in self._all_pieces():
            if left is not None and piece.num_bytes >= left:
                text = piece.text.encode()[:left].decode(errors="ignore")
                yield Piece(text=text, num_bytes=left, is_last=True, file=piece.file, row=piece.row)
                return
            if left is not None:
                left -= piece.num_bytes
            yield piece

    def _all_pieces(self) -> Iterator[Piece]:
        for path in self._files:
            name = path.name if path == self._root else path.relative_to(self._root).as_posix()
            suffix = path.suffix.lower()
            if suffix in _JSONL:
                yield from _read_jsonl(path, name)
            elif suffix in _PARQUET:
                yield from _read_parquet(path, name)
            elif not self._skips_undecodable:
                yield from _read_text(path, name)
            else:
                yield from self._read_or_skip(path, name)

    def _read_or_skip(self, path: Path, name: str) -> Iterator[Piece]:
        try:
            pieces = list(_read_text(path, name))
        except DataError as error:
            if name not in self._skipped:
                self._skipped[name] = None
                logger.info("left out %s: %s", name, error.reason)
            return
        yield from pieces


def find_source(source: str) -> Source:
    """'stdlib', or the path of a file or folder. Raises DataError when there is nothing to read."""
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = tuple(path for path in _walk(root, _INSTALLED) if path.suffix == ".py")
        return Source("the Python standard library", root, files, skips_undecodable=True)
    path = Path(source).expanduser()
    if path.is_file():
        return Source(source, path, (path,))
    if not path.is_dir():
        raise DataError("no such file or folder; data.prepare.source takes a path, or 'stdlib'", file=source)
    readable = _JSONL | _PARQUET | _TEXT
    files = tuple(file for file in _walk(path) if file.suffix.lower() in readable and not _is_binary(file))
    if not files:
        raise DataError("no text, source code, JSONL or Parquet file in this folder", file=source)
    return Source(source, path, files)


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Regular files below ``root``, ordered by path, without hidden entries and without following folder links."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in _SKIPPED_FOLDERS and n not in skipped)
        for file in sorted(files):
            path = Path(folder, file)
            if not file.startswith(".") and path.is_file():
                yield path


def _is_binary(path: Path) -> bool:
    if path.suffix.lower() in _PARQUET:
        return False
    with path.open("rb") as stream:
        return b"\0" in stream.read(8192)


def _read_text(path: Path, name: str) -> Iterator[Piece]:
    line, held, is_started = 1, b"", False
    with path.open("rb") as stream:
        while True:
            block = stream.read(PIECE_BYTES)
            data = held + block
            cut = len(data) if len(block) < PIECE_BYTES else _cut(data)
            text = _decode(data[:cut], name, line)
            held = data[cut:]
            line += data.count(b"\n", 0, cut)
            is_last = len(block) < PIECE_BYTES
            if text or (is_last and is_started):
                yield Piece(text=text, num_bytes=cut, is_last=is_last, file=name)
            is_started = is_started or bool(text)
            if is_last:
                return


def _cut(data: bytes) -> int:
    """Where to cut a block: after its last line end, else before a character that may be incomplete."""
    newline = data.rfind(b"\n") + 1
    if newline:
        return newline
    cut = len(data)
    while cut > len(data) - 4 and data[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    return cut - 1 if data[cut - 1] >= 0xC0 else cut


def _decode(data: bytes, name: str, row: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = row + data.count(b"\n", 0, error.start)
        raise DataError(
            f"not valid UTF-8 (byte 0x{data[error.start]:02x}: {error.reason}); convert the file to UTF-8", name, at
        ) from error


def _read_jsonl(path: Path, name: str) -> Iterator[Piece]:
    with path.open("rb") as stream:
        row = 0
        while line := stream.readline(MAX_LINE_BYTES):
            row += 1
            if len(line) == MAX_LINE_BYTES:
                raise DataError(f"line longer than {MAX_LINE_BYTES >> 20} MiB", name, row)
            if line.isspace():
                continue
            text = _text_of(_decode(line, name, row), name, row)
            yield from _split(text, name, row)


def _text_of(line: str, name: str, row: int) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"not a JSON object: {error}", name, row) from error
    text = record.get(TEXT_FIELD) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f"expected an object with a string field {TEXT_FIELD!r}", name, row)
    return text


def _read_parquet(path: Path, name: str) -> Iterator[Piece]:
    try:
        with pq.ParquetFile(path) as table:
            if TEXT_FIELD not in table.schema_arrow.names:
                found = ", ".join(table.schema_arrow.names)
                raise DataError(f"no column {TEXT_FIELD!r}; the columns are: {found}", name)
            row = 0
            for batch in table.iter_batches(batch_size=1024, columns=[TEXT_FIELD]):
                for value in batch.column(0).to_pylist():
                    if not isinstance(value, str):
                        raise DataError(f"column {TEXT_FIELD!r} holds {type(value).__name__}, not text", name, row)
                    yield from _split(value, name, row)
                    row += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"not readable as Parquet: {error}", name) from error


def _split(text: str, name: str, row: int) -> Iterator[Piece]:
    """Pieces of a document already in memory, none of an empty one. JSON can carry lone surrogates: refused."""
    parts = [text[start : start + PIECE_BYTES] for start in range(0, len(text), PIECE_BYTES)]
    for index, part in enumerate(parts):
        try:
            num_bytes = len(part.encode())
        except UnicodeEncodeError as error:
            raise DataError(f"text holds a lone surrogate: {error.reason}", name, row) from error
        yield Piece(text=part, num_bytes=num_bytes, is_last=index == len(parts) - 1, file=name, row=row)
