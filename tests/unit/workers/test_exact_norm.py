"""The norm that does not depend on how gradients are cut, and what is left out of it."""

from __future__ import annotations

import math

import pytest
import torch

from workers.exact_norm import exact_norm

CPU = torch.device("cpu")


def gradients(seed: int, num: int = 4099) -> torch.Tensor:
    """Of very different sizes, as real ones are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, generator=generator) * torch.exp(4 * torch.randn(num, generator=generator))


def norm_of(*tensors: torch.Tensor, count: int | None = None) -> float:
    total = sum(tensor.numel() for tensor in tensors)
    return exact_norm(tensors, count=total if count is None else count, device=CPU).item()


@pytest.mark.parametrize("seed", range(5))
def test_the_norm_has_the_same_bits_however_it_is_cut_and_in_any_order(seed: int) -> None:
    whole = gradients(seed)
    expected = norm_of(whole)
    for parts in (2, 3, 7, 500):
        assert norm_of(*whole.chunk(parts)) == expected
    mixed = whole[torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))]
    assert norm_of(*mixed.chunk(3)) == expected


def test_a_plain_fp64_sum_of_the_same_numbers_does_depend_on_it() -> None:
    """Else the test above could not fail."""
    sums = set()
    for seed in range(5):
        whole = gradients(seed).double().square()
        sums |= {(seed, whole[order].cumsum(0)[-1].item()) for order in (slice(None), torch.arange(len(whole)).flip(0))}
    assert len(sums) > 5


@pytest.mark.parametrize("count", [None, 1 << 24, 1 << 33, 1 << 40])
def test_the_norm_is_that_of_fp64_whatever_the_size_of_the_model(count: int | None) -> None:
    whole = gradients(3)
    correct = math.sqrt(math.fsum((whole.double() ** 2).tolist()))
    assert norm_of(whole, count=count) == pytest.approx(correct, rel=1e-12)


def test_tiny_numbers_beside_a_large_one_are_not_lost() -> None:
    tensors = torch.full((1 << 18,), 2.0**-20), torch.ones(1)
    assert norm_of(*tensors) == pytest.approx(math.sqrt(1 + 2.0 ** (18 - 40)), rel=1e-15)


def test_extremes_neither_overflow_nor_vanish() -> None:
    assert norm_of(torch.full((4,), 3e38)) == pytest.approx(2 * 3e38, rel=1e-6)
    assert norm_of(torch.full((4,), 1e-44)) == pytest.approx(2 * torch.tensor(1e-44).double().item(), rel=1e-12)
    assert norm_of(torch.zeros(4), torch.empty(0)) == 0.0
    assert norm_of() == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    assert not math.isfinite(norm_of(torch.tensor([1.0, bad, 2.0]), torch.ones(3)))
