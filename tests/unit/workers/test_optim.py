"""The learning rate as a function of the step, and which parameters decay."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn

from workers.config import OptimConfig
from workers.optim import build_optimizer, build_scheduler, lr_factor_at, warn_of_new_length

CONFIG = OptimConfig(lr=1e-3, warmup_steps=5, min_lr_ratio=0.1)


def test_the_rate_rises_in_a_line_and_falls_as_a_cosine_to_its_floor() -> None:
    assert [lr_factor_at(step, CONFIG, 100) for step in range(1, 6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    middle = 5 + 95 / 2
    around = (lr_factor_at(step, CONFIG, 100) for step in (math.floor(middle), math.ceil(middle)))
    assert sum(around) / 2 == pytest.approx(0.55)
    assert lr_factor_at(100, CONFIG, 100) == pytest.approx(0.1)
    assert lr_factor_at(1000, CONFIG, 100) == pytest.approx(0.1)


@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 10), (10, 10), (20, 10), (0, 1)])
def test_short_runs_have_a_rate_too(warmup_steps: int, total_steps: int) -> None:
    config = OptimConfig(lr=1.0, warmup_steps=warmup_steps)
    assert all(0 < lr_factor_at(step, config, total_steps) <= 1 for step in range(1, total_steps + 1))


def test_the_scheduler_gives_the_optimizer_that_rate_at_every_step() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), CONFIG)
    scheduler = build_scheduler(optimizer, CONFIG, 100)
    for step in range(1, 120):
        expected = CONFIG.lr * lr_factor_at(step, CONFIG, 100)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, abs=1e-15)
        optimizer.step()
        scheduler.step()


def test_matrices_decay_and_vectors_do_not_frozen_ones_included() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model[0].weight.requires_grad_(False)
    decay, no_decay = build_optimizer(model, OptimConfig(weight_decay=0.3)).param_groups
    assert (decay["weight_decay"], decay["param_names"]) == (0.3, ["0.weight"])
    assert (no_decay["weight_decay"], no_decay["param_names"]) == (0.0, ["0.bias", "1.weight", "1.bias"])


def test_the_first_update_has_the_size_of_the_rate() -> None:
    """B25's number: 0.1000 with unit gradients, and a counter of 1."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.0, warmup_steps=0))
    build_scheduler(optimizer, OptimConfig(lr=0.1, warmup_steps=0), 10)
    optimizer.param_groups[0]["lr"] = 0.1
    before = model.weight.item()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert before - model.weight.item() == pytest.approx(0.1, rel=1e-6)
    assert optimizer.state[model.weight]["step"].item() == 1.0


def test_a_schedule_of_another_length_is_warned_of_with_lengths_and_rates(caplog: pytest.LogCaptureFixture) -> None:
    config = OptimConfig(lr=1e-3, warmup_steps=10, min_lr_ratio=0.1)
    with caplog.at_level(logging.WARNING):
        assert warn_of_new_length(1500, config, 175, step=147, rank=1) == (1500, 175)
        assert caplog.messages == []
        assert warn_of_new_length(1500, config, 175, step=147, rank=0) == (1500, 175)
    (said,) = caplog.messages
    now, before = (1e-3 * lr_factor_at(148, config, steps) for steps in (175, 1500))
    for words in ("was 1500", "is 175 now", "step 148", f"{now:.3g}", f"({before:.3g} by the old one)"):
        assert words in said


@pytest.mark.parametrize(("saved", "ratio"), [(100, 0.1), (None, 0.1), (80, 1.0)])
def test_no_word_of_a_schedule_that_is_as_long_or_not_known_or_that_stays_at_its_peak(
    caplog: pytest.LogCaptureFixture, saved: int | None, ratio: float
) -> None:
    config = OptimConfig(lr=1e-3, warmup_steps=5, min_lr_ratio=ratio)
    assert warn_of_new_length(saved, config, 100, step=7, rank=0) is None
    assert caplog.messages == []
