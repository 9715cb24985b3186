"""Datasets before the first worker: found, made, or refused with every problem named. Real files and tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig
from orchestrator.data_check import ensure_dataset
from orchestrator.errors import ConfigError
from tests.fakes.token_datasets import write_numbered_rows


def config_of(tmp_path: Path, **data: Any) -> RunConfig:
    settings = {"sequence_length": 16, "global_batch": 4, "validation_fraction": 0.1} | data
    return RunConfig.model_validate(
        {"run": {"name": "r", "url": str(tmp_path / "run"), "steps": 2}, "model": {}, "data": settings}
    )


def text_at(path: Path, sentence: str) -> str:
    path.write_text(sentence * 300)
    return str(path)


def test_sources_that_are_not_there_are_prepared_with_the_tokenizer_of_the_first(tmp_path: Path) -> None:
    sources = [
        {
            "url": str(tmp_path / name),
            "weight": weight,
            "prepare": {"source": text_at(tmp_path / f"{name}.txt", text), "vocab_size": 300, "format": data_format},
        }
        for name, weight, text, data_format in (
            ("wiki", 0.75, "zebras graze beyond the quarry\n", "parquet"),
            ("code", 0.25, "def answer(): return 'forty-two'\n", "arrow"),
        )
    ]
    config, notes = config_of(tmp_path, sources=sources), list[str]()
    wiki, code = ensure_dataset(config, notes.append)
    assert wiki.tokenizer_digest == code.tokenizer_digest
    assert {file.name.rpartition(".")[2] for file in code.files} == {"arrow"}
    assert sum(note.startswith("preparing the dataset") for note in notes) == 2
    notes.clear()
    assert ensure_dataset(config, notes.append) == (wiki, code)
    assert notes == []


def test_sources_that_do_not_agree_are_refused_with_every_field(tmp_path: Path) -> None:
    write_numbered_rows(str(tmp_path / "a"), 20, sequence_length=16)
    write_numbered_rows(str(tmp_path / "b"), 20, sequence_length=8, vocab_size=99, tokenizer=b"other")
    config = config_of(tmp_path, sources=[{"url": str(tmp_path / name)} for name in "ab"])
    with pytest.raises(ConfigError) as caught:
        ensure_dataset(config, list[str]().append)
    text = str(caught.value)
    for line in ("sequence_length: a has 16, b has 8", "vocabulary: a has 20, b has 99", "in tokenizer: a has"):
        assert line in text


def test_a_source_without_data_or_a_way_to_make_it_is_named(tmp_path: Path) -> None:
    write_numbered_rows(str(tmp_path / "a"), 20, sequence_length=16)
    config = config_of(tmp_path, sources=[{"url": str(tmp_path / name)} for name in "ab"])
    with pytest.raises(ConfigError, match=r"data\.sources\.url .*/b holds no dataset: run `raysume data prepare`"):
        ensure_dataset(config, list[str]().append)


def test_a_batch_larger_than_all_rows_together_is_refused(tmp_path: Path) -> None:
    write_numbered_rows(str(tmp_path / "a"), 3, sequence_length=16)
    with pytest.raises(ConfigError, match=r"data\.global_batch is 4, the dataset has 3 rows"):
        ensure_dataset(config_of(tmp_path, url=str(tmp_path / "a")), list[str]().append)
