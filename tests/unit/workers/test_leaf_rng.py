"""Numbers drawn in a leaf belong to the leaf; the rank's own go on as if none had been drawn."""

from __future__ import annotations

import random

import numpy as np
import torch

from workers.leaf_rng import LeafRng
from workers.rng import seed_rng

Draws = tuple[float, float, float]


def draw() -> Draws:
    return float(torch.rand(1)), float(np.random.rand()), random.random()


def of_leaf(rng: LeafRng, step: int, leaf: int) -> Draws:
    rng.begin(step, leaf)
    return draw()


def test_a_leaf_draws_the_same_numbers_on_any_rank_and_after_any_others() -> None:
    seed_rng(1, 0, 0)
    first = LeafRng(7)
    drawn = {leaf: of_leaf(first, 3, leaf) for leaf in range(4)}
    seed_rng(1, 1, 0)
    second = LeafRng(7)
    assert {leaf: of_leaf(second, 3, leaf) for leaf in (3, 0)} == {3: drawn[3], 0: drawn[0]}


def test_each_leaf_step_seed_and_purpose_has_its_own() -> None:
    rng = LeafRng(7)
    found = {of_leaf(rng, step, leaf) for step in (1, 2) for leaf in (0, 1)} | {of_leaf(LeafRng(8), 1, 0)}
    rng.begin(1, 0, purpose="eval")
    found.add(draw())
    assert len(found) == 6
    assert all(len({each[position] for each in found}) == 6 for position in range(3))


def test_the_ranks_own_numbers_go_on_as_if_no_leaf_had_drawn() -> None:
    seed_rng(1, 2, 0)
    undisturbed = [draw(), draw()]
    seed_rng(1, 2, 0)
    rng, found = LeafRng(7), []
    for step in (1, 2):
        rng.end()  # nothing to end
        for leaf in (2, 3):
            of_leaf(rng, step, leaf)
        rng.end()
        found.append(draw())
    assert found == undisturbed
