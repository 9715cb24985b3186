"""The vector's layout by pure arithmetic: no process group, no torch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from workers.contract import BoundOrder, OrderKind
from workers.reduction import leaf_weight, num_rounds
from workers.step_vector import StepTotals, StepVectorLayout

NUM_LEAVES = 7
MAX_DIGEST = (1 << 48) - 1


def summed_over(world_size: int, losses: list[float], digests: list[int]) -> StepTotals:
    """What an all-reduce of every rank's part gives."""
    layout = StepVectorLayout(num_leaves=NUM_LEAVES, world_size=world_size)
    total = [0.0] * layout.size
    for rank in range(world_size):
        own = range(rank, NUM_LEAVES, world_size)
        words = layout.rank_part(
            step=12,
            digests={leaf: digests[leaf] for leaf in own},
            rank=rank,
            compute_s=rank + 0.5,
            replicated=(rank != 1, True),
            left_out=(rank == 1,),
            gradient_count=100 if rank == 0 else 0,
            is_pressed=rank != 1,
        )
        words[layout.gradient_sum_slot] = 0.5 if rank == 0 else 0.0
        for leaf in own:
            words[layout.loss_slot(leaf)] = losses[leaf]
        if rank == 0:
            order = BoundOrder(number=3, kind=OrderKind.LEAVE, step=14)
            layout.add_rank0_part(
                words, order=order, lr=1e-3 / 3, step_s=0.25, memory_step=13, memory_stall_s=0.5, pressed_share=0.75
            )
            words[layout.grad_norm_slot] = 1.75
        total = [a + b for a, b in zip(total, words, strict=True)]
    return layout.read(total)


def test_the_sum_says_the_same_bits_at_any_world_size() -> None:
    draw = random.Random(4)
    losses = [draw.uniform(0, 12) for _ in range(NUM_LEAVES)]
    digests = [draw.randrange(MAX_DIGEST) for _ in range(NUM_LEAVES - 1)] + [MAX_DIGEST]
    alone = summed_over(1, losses, digests)
    assert alone.leaf_digests == tuple(digests)
    assert (alone.lr, alone.step_s, alone.grad_norm, alone.mean_step) == (1e-3 / 3, 0.25, 1.75, 12)
    assert alone.order == BoundOrder(number=3, kind=OrderKind.LEAVE, step=14)
    assert (alone.memory_step, alone.memory_stall_s) == (13, 0.5)
    assert (alone.gradient_sum, alone.gradient_count, alone.pressed_share) == (0.5, 100, 0.75)
    assert alone.ranks_pressed == 1
    for world_size in (2, 3, 4, 9):
        totals = summed_over(world_size, losses, digests)
        assert totals.compute_s == tuple(rank + 0.5 for rank in range(world_size))
        assert totals.num_replicated == (world_size - 1, world_size, 0)
        assert totals.num_left_out == (1, 0, 0)
        assert totals.ranks_pressed == world_size - 1
        same = replace(
            totals,
            compute_s=alone.compute_s,
            num_replicated=alone.num_replicated,
            num_left_out=(0, 0, 0),
            ranks_pressed=1,
        )
        assert same == alone


def test_a_loss_that_is_not_finite_stays_visible() -> None:
    assert summed_over(2, [float("nan")] + [1.0] * 6, [0] * 7).loss != summed_over(2, [1.0] * 7, [0] * 7).loss
    assert summed_over(2, [float("inf")] + [1.0] * 6, [0] * 7).loss == float("inf")


def test_ranks_at_different_steps_give_themselves_away() -> None:
    layout = StepVectorLayout(num_leaves=1, world_size=2)
    parts = [layout.rank_part(step=step, digests={}) for step in (5, 6)]
    total = [a + b for a, b in zip(*parts, strict=True)]
    assert layout.read(total).mean_step == 5.5


@pytest.mark.parametrize("index", [-1, NUM_LEAVES])
def test_a_leaf_outside_the_batch_is_refused(index: int) -> None:
    layout = StepVectorLayout(num_leaves=NUM_LEAVES, world_size=2)
    with pytest.raises(ValueError, match="leaf"):
        layout.loss_slot(index)
    with pytest.raises(ValueError, match="leaf"):
        layout.digest_slot(index)


def test_a_vector_of_another_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="7 leaves need"):
        StepVectorLayout(num_leaves=NUM_LEAVES, world_size=1).read([0.0] * 5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8])
def test_the_weights_of_all_leaves_add_up_to_one_whatever_the_world_size(world_size: int) -> None:
    rounds = num_rounds(NUM_LEAVES, world_size)
    indices = [round_index * world_size + rank for round_index in range(rounds) for rank in range(world_size)]
    weights = [leaf_weight(num_leaves=NUM_LEAVES, is_surplus=index >= NUM_LEAVES) for index in indices]
    assert len([weight for weight in weights if weight]) == NUM_LEAVES
    assert sum(weights) == pytest.approx(1.0)


def test_words_of_different_kinds_never_share_a_place() -> None:
    layout = StepVectorLayout(num_leaves=2, world_size=2)
    slots = [layout.grad_norm_slot, layout.gradient_sum_slot, *(layout.loss_slot(leaf) for leaf in range(2))]
    slots += [layout.digest_slot(leaf) for leaf in range(2)] + [layout.compute_slot(rank) for rank in range(2)]
    words = layout.rank_part(
        step=3, digests={}, replicated=(True,) * 3, left_out=(True,) * 3, gradient_count=5, is_pressed=True
    )
    order = BoundOrder(number=1, kind=OrderKind.LEAVE, step=9)
    layout.add_rank0_part(words, order=order, lr=0.1, step_s=0.2, memory_step=4, memory_stall_s=0.3, pressed_share=0.4)
    assert all(words[slot] == 0 for slot in slots), "on the device or another rank, and so nowhere here"
    assert len(set(slots)) == len(slots)
    assert sum(word != 0 for word in words) == 17
