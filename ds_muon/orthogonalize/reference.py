"""Newton-Schulz in fp64, by the plain iteration: what every faster form is measured against.

It shares nothing with the fast path but the coefficients, so a mistake there cannot hide in a mistake here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_muon.orthogonalize.coefficients import schedule
from ds_muon.orthogonalize.defaults import NS_COEFFICIENTS, NS_STEPS


def reference_newton_schulz(
    matrix: Tensor,
    *,
    ns_steps: int | None = NS_STEPS,
    ns_coefficients: str | Sequence[Sequence[float]] = NS_COEFFICIENTS,
) -> Tensor:
    """The fp64 result for one matrix: from X / ||X||_F on, X <- a X + b (X X^T) X + c (X X^T)^2 X, a triple a step.

    Args:
        matrix: (rows, cols), any real dtype; not modified.
        ns_steps: number of polynomial steps; by default the table's own number.
        ns_coefficients: a table's name or a list of triples.

    Returns:
        (rows, cols) in fp64, on the device of ``matrix``; exact zeros for a zero matrix.
    """
    x = matrix.to(torch.float64)
    x = x.mT if x.shape[0] > x.shape[1] else x
    norm = torch.linalg.vector_norm(x)
    if norm == 0:
        return torch.zeros_like(matrix, dtype=torch.float64)
    x = x / norm
    for a, b, c in schedule(ns_coefficients, ns_steps):
        gram = x @ x.mT
        x = torch.add(a * x, (b * gram + c * gram @ gram) @ x)
    return x.mT.contiguous() if matrix.shape[0] > matrix.shape[1] else x
