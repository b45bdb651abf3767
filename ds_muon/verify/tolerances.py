"""What an error may be, by the arithmetic that makes it. One table, and the noise that roundings put into an input.

A tolerance against fp64 is the sum of three parts:

1. The iteration's own rounding, by its dtype: ``AGAINST_FP64``. The figures are for ``quintic`` and condition numbers
   up to 1e4. A step adds terms of size ``|a| + |b| + |c|`` to a result of about 1, so tables with larger coefficients
   lose more digits, in that proportion.
2. What the roundings of its *input* explain, which depends on the matrix: a small singular value magnifies them up to
   485 times (the slope of five ``quintic`` steps at 0). Their variance is carried through sums, momentum and blend
   element by element, and the reference is run on inputs disturbed by as much: ``SAFETY`` times the root mean square
   of what that changes.
3. Two roundings of the fp32 weights, one for the decay and one for the update: ``WEIGHT_ROUNDINGS``.

The same-dtype comparison starts from the engine's own averaged gradient and does the same operations in the same
dtypes. It leaves no rounding to explain but the order of summation inside a vendor's matrix product, which may depend
on the batch: ``AGAINST_SAME_DTYPE``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_muon.orthogonalize import schedule
from ds_muon.verify.engine_view import MuonRule

AGAINST_FP64 = {
    # Measured: 5.5e-6, 5.8e-3 and 4.7e-2, the worst of gram and standard, quintic, up to 1024 x 4096, condition 1e4.
    torch.float32: 1e-5,
    torch.float16: 0.01,
    torch.bfloat16: 0.06,
}

AGAINST_SAME_DTYPE = {
    # fp32 products run alone, each matrix in one order: 0 measured. 1e-6 leaves room for AdamW's fused kernels.
    torch.float32: 1e-6,
    # Half precision: one rounding step of the dtype. Measured: 0, but for the shapes whose batched product sums in
    # another order than the single one (README): 7e-4 and 3e-3.
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
}

# Momentum and moments beside the same-dtype reference: elementwise, the same operations in the same order.
STATE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}

# Root mean squares that an input error may reach. The change of the output is the more random the fewer singular values
# carry it; of `draws` disturbed references it is estimated as a t distribution of as many degrees of freedom.
SAFETY = 4.0

WEIGHT_ROUNDINGS = 2 * 2.0**-24

# A rounding error is uniform within half a unit in the last place: its root mean square is this much of its bound.
_UNIFORM = 3.0**-0.5

# As many roundings of the iteration's input weigh as much as all of its roundings that a small singular value
# magnifies: the cast of X, and in the first step those of R, R^2, b R + c R^2 and the new X. Later steps magnify less.
_INPUT_ROUNDINGS = 5


def iteration_tolerance(rule: MuonRule) -> float:
    """Part 1: relative error of the iteration itself."""
    quintic, used = (
        max(abs(a) + abs(b) + abs(c) for a, b, c in schedule(table, rule.ns_steps))
        for table in ("quintic", rule.ns_coefficients)
    )
    return AGAINST_FP64[rule.ns_dtype] * max(1.0, used / quintic)


def draws(shape: tuple[int, ...]) -> int:
    """Disturbed references per matrix: many where few singular values matter, which are small matrices only."""
    return 16 if min(shape) <= 128 else 3


def sum_variance(magnitude: Tensor, dtype: torch.dtype, additions: int, loss_scale: float) -> Tensor:
    """Variance of an average that was summed in ``dtype``.

    Args:
        magnitude: average magnitude of the terms, unscaled, elementwise.
        additions: how often a partial sum was rounded; none is larger than the sum of the magnitudes.
        loss_scale: factor that the terms had while they were summed.
    """
    limits = torch.finfo(dtype)
    smallest = limits.tiny * limits.eps / 2 / loss_scale
    once = torch.where(magnitude > 0, magnitude * (limits.eps / 2) + smallest, 0.0) * _UNIFORM
    return once.square_().mul_(additions)


def stored_variance(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Variance of one rounding to ``dtype``, and of the fp32 arithmetic before it."""
    once = _UNIFORM * max(torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps)
    return value.square().mul_(once**2)


def iteration_variance(direction: Tensor, dtype: torch.dtype) -> Tensor:
    """Variance of the input of the iteration by the roundings to its dtype.

    ``direction`` is normalized to Frobenius norm 1 before it is cast, where fp16 has little range below.
    """
    limits = torch.finfo(dtype)
    norm: Tensor = torch.linalg.vector_norm(direction)
    once: Tensor = _UNIFORM * (direction.abs() * (limits.eps / 2) + norm * (limits.tiny * limits.eps / 2))
    return once.square_().mul_(_INPUT_ROUNDINGS)
