"""The arithmetic of tolerances: what rounding explains, and not much more."""

from __future__ import annotations

import pytest
import torch

from ds_muon.verify import tolerances

# ---- the arithmetic of tolerances -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("additions", [2, 8, 32])
def test_the_variance_of_a_sum_bounds_that_of_real_sums_and_is_not_far_above(
    dtype: torch.dtype, additions: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(additions, 20_000, generator=generator).to(dtype)
    total = torch.zeros(20_000, dtype=dtype)
    for term in terms:
        total += term
    error = total.double() - terms.double().sum(0)
    magnitude = terms.double().abs().sum(0)
    bound = tolerances.sum_variance(magnitude, dtype, additions, 1.0).mean().sqrt()
    measured = error.square().mean().sqrt()
    assert measured < bound < 10 * measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_rounding_has_the_variance_that_is_said(dtype: torch.dtype) -> None:
    value = torch.randn(50_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    measured = (value.to(dtype).double() - value).square().mean().sqrt()
    explained = tolerances.stored_variance(value, dtype).mean().sqrt()
    assert measured < explained < 3 * measured
