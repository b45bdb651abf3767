"""What an error may be, by the arithmetic that makes it. One table, and the noise that roundings put into an input.

A tolerance against fp64 is the sum of three parts:

1. A floor by the dtype of the iteration, ``AGAINST_FP64``, which holds for ``quintic`` and condition numbers up to 1e4.
2. What roundings do to this very matrix: a small singular value magnifies those of the input up to 485 times (the slope
   of five ``quintic`` steps at 0), large coefficients those of each step. The variance of the gradient's sums is
   carried through momentum and blend element by element; the reference then runs on inputs disturbed by as much, with
   a random rounding after each of its products. ``explained`` says how much of what that changes is allowed.
3. Two roundings of the fp32 weights, one for the decay and one for the update: ``WEIGHT_ROUNDINGS``.

The same-dtype comparison starts from the engine's own averaged gradient and does the same operations in the same
dtypes. It leaves nothing to explain but the order of summation inside a vendor's matrix product, which may depend on
the number of matrices in the batch: on GPUs the nearest of the possible numbers counts. ``AGAINST_SAME_DTYPE``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

AGAINST_FP64 = {
    # Measured: 5.5e-6, 5.8e-3 and 4.7e-2, the worst of gram and standard, quintic, up to 1024 x 4096, condition 1e4.
    torch.float32: 1e-5,
    torch.float16: 0.01,
    torch.bfloat16: 0.06,
}

AGAINST_SAME_DTYPE = {
    # fp32 products run alone, each matrix in one order: 0 measured. 1e-6 leaves room for AdamW's fused kernels.
    torch.float32: 1e-6,
    # Half precision: one rounding step of the dtype. Measured: 0, in a batch of the right size.
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
}

# How often an element may be off by the root mean square that ``AGAINST_SAME_DTYPE`` allows. Errors that roundings make
# are spread over all elements: of ten million, the largest is about five root mean squares. One lost element of many is
# nothing in a norm.
LARGEST_ELEMENT = 8.0

# Momentum and moments beside the same-dtype reference: elementwise, the same operations in the same order.
STATE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}

# Root mean squares that the error of an average, or of AdamW's update, may reach.
SAFETY = 4.0

# Of the changes that random roundings make, `draws` of them: so often the mean, and so often the standard deviation.
# That is small beside the mean where many singular values carry the error, which then is nearly the same every time;
# where one small singular value does, the error is a normal variable.
_MEANS, _DEVIATIONS = 1.5, 8.0

WEIGHT_ROUNDINGS = 2 * 2.0**-24

# A rounding error is uniform within half a unit in the last place: its root mean square is this much of its bound.
_UNIFORM = 3.0**-0.5


def draws(shape: tuple[int, ...]) -> int:
    """Disturbed references per matrix: many where few singular values matter, which are small matrices only."""
    return 16 if min(shape) <= 128 else 4


def explained(changes: Sequence[float]) -> float:
    """What an update may differ by, given by how much it does under random roundings, once per draw."""
    if not all(map(math.isfinite, changes)):
        return math.inf
    return _MEANS * statistics.fmean(changes) + _DEVIATIONS * statistics.stdev(changes)


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


def rounding(value: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A random error such as one rounding of ``value`` to ``dtype`` makes, in fp64."""
    limits = torch.finfo(dtype)
    bound = value.abs().mul_(limits.eps / 2).clamp_min_(limits.tiny * limits.eps / 2)
    return torch.empty_like(value).uniform_(-1, 1, generator=generator).mul_(bound)
