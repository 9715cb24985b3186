"""The data's identity as a Tracker."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.fakes.token_datasets import write_numbered_rows
from workers.data_errors import DatasetChanged
from workers.data_identity import DataIdentity


def identity(url: Path, num_rows: int, *, seed: int = 1, allow_changed: bool = False) -> DataIdentity:
    card = write_numbered_rows(str(url), num_rows)
    return DataIdentity(card, seed=seed, global_batch=4, allow_changed=allow_changed)


def test_the_same_data_is_taken(tmp_path: Path) -> None:
    identity(tmp_path / "b", 8).load_state_dict(identity(tmp_path / "a", 8).state_dict())


@pytest.mark.parametrize(("num_rows", "seed", "field"), [(10, 1, "total_rows"), (8, 2, "seed")])
def test_other_data_or_another_seed_is_refused_by_name(tmp_path: Path, num_rows: int, seed: int, field: str) -> None:
    saved = identity(tmp_path / "a", 8).state_dict()
    with pytest.raises(DatasetChanged, match=field):
        identity(tmp_path / "b", num_rows, seed=seed).load_state_dict(saved)


def test_a_change_that_is_allowed_is_said_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = identity(tmp_path / "a", 8).state_dict()
    with caplog.at_level(logging.WARNING):
        identity(tmp_path / "b", 8, seed=2, allow_changed=True).load_state_dict(saved)
    assert "seed" in caplog.text
