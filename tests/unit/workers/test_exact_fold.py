"""The fold of leaves in worlds of any size. The ranks are virtual: what they would send is handed over."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from workers.exact_fold import LeafFold, Round

NUM_LEAVES, NUM = 7, 64


def cancelling() -> torch.Tensor:
    """Leaves of very different sizes that cancel out but for one: what is left in fp64 depends on the order."""
    generator = torch.Generator().manual_seed(0)
    half = NUM_LEAVES // 2
    powers = torch.randint(0, 70, (half, NUM), generator=generator)
    large = torch.ldexp(torch.randn(half, NUM, generator=generator), powers)
    leaves = torch.cat(
        (large, torch.randn(1, NUM, generator=generator), -large[torch.randperm(half, generator=generator)])
    )
    leaves[:, 0] = -0.0
    return leaves


LEAVES = cancelling()


def in_order(order: Iterable[int]) -> torch.Tensor:
    total = torch.zeros(NUM, dtype=torch.float64)
    for leaf in order:
        total += LEAVES[leaf]
    return total.float()


def folded(world_size: int) -> list[torch.Tensor]:
    """What FSDP2 is told in each round, by one of ``world_size`` ranks. Surplus leaves are not numbers."""
    current = Round()
    fold = LeafFold(current)
    told = []
    for number in range(-(-NUM_LEAVES // world_size)):
        current.begin(number, num_leaves=NUM_LEAVES, world_size=world_size)
        sent = list(LEAVES[number * world_size : (number + 1) * world_size])
        sent += [torch.full_like(LEAVES[0], torch.nan)] * (world_size - len(sent))
        output = torch.full_like(LEAVES[0], torch.nan)
        fold._add(sent, output)
        told.append(output)
    return told


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 9])
def test_the_sum_in_leaf_order_comes_in_the_last_round_and_zeros_before(world_size: int) -> None:
    *before, last = folded(world_size)
    assert torch.equal(last, in_order(range(NUM_LEAVES)))
    assert not last[0].signbit()
    assert all(torch.equal(one, torch.zeros(NUM)) for one in before)


def test_another_order_of_these_leaves_has_another_sum() -> None:
    """Else the test above could not fail."""
    expected = in_order(range(NUM_LEAVES))
    for order in (reversed(range(NUM_LEAVES)), (0, 2, 4, 6, 1, 3, 5), (1, 0, 3, 2, 5, 4, 6), (2, 1, 0, 5, 4, 3, 6)):
        assert int((in_order(order) != expected).sum()) > NUM // 8


def test_the_next_step_begins_from_nothing() -> None:
    current = Round()
    fold = LeafFold(current)
    output = torch.empty(2)
    for _ in range(2):
        current.begin(0, num_leaves=1, world_size=1)
        fold._add([torch.ones(2)], output)
        assert torch.equal(output, torch.ones(2))
