"""How a World is cut into replicas of shards, and what of it a configuration may ask for."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from workers.config import ModelConfig
from workers.mesh import fitting_shard_size


@pytest.mark.parametrize(
    ("world_size", "shard_size", "expected"),
    [(4, 2, 2), (4, 3, 4), (4, 1, 1), (3, 2, 3), (6, 2, 2), (6, 4, 6), (9, 2, 3), (1, 8, 1), (2, 8, 2), (12, 5, 6)],
)
def test_no_rank_holds_more_than_it_was_meant_to(world_size: int, shard_size: int, expected: int) -> None:
    assert fitting_shard_size(world_size, shard_size) == expected


@pytest.mark.parametrize("given", [{"parallelism": "hsdp"}, {"shard_size": 2}, {"parallelism": "ddp", "shard_size": 2}])
def test_a_shard_size_and_hsdp_go_together(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"model\.shard_size goes with parallelism hsdp"):
        ModelConfig.model_validate(given)
    assert ModelConfig.model_validate({"parallelism": "hsdp", "shard_size": 2}).shard_size == 2
