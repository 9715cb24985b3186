"""`raysume data prepare` as typed: formats and the tokenizer of another dataset. Real files and tokenizers."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.exit_codes import ExitCode
from storage.open_store import open_store
from workers.dataset_card import load_card

SIZES = ["--sequence-length", "16", "--vocab-size", "300"]


def test_a_second_dataset_of_another_format_takes_the_tokenizer_of_the_first(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("zebras graze beyond the quarry\n" * 200)
    runner = CliRunner()
    first = runner.invoke(app, ["data", "prepare", str(text), str(tmp_path / "a"), *SIZES])
    more = ["--format", "arrow", "--tokenizer", str(tmp_path / "a")]
    second = runner.invoke(app, ["data", "prepare", str(text), str(tmp_path / "b"), *SIZES, *more])
    assert (first.exit_code, second.exit_code) == (0, 0), second.output
    cards = [load_card(open_store(str(tmp_path / name))) for name in "ab"]
    assert cards[0].tokenizer_digest == cards[1].tokenizer_digest
    assert [{file.name.rpartition(".")[2] for file in card.files} for card in cards] == [{"parquet"}, {"arrow"}]


def test_an_unknown_format_or_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("words " * 100)
    command = ["data", "prepare", str(tmp_path / "text.txt"), str(tmp_path / "a"), *SIZES]
    assert CliRunner().invoke(app, [*command, "--format", "csv"]).exit_code != 0
    missing = CliRunner().invoke(app, [*command, "--tokenizer", str(tmp_path / "nowhere")])
    assert missing.exit_code == ExitCode.CONFIG_ERROR
    assert "neither a dataset" in missing.output
