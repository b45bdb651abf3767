"""The update rule of one Muon matrix. Here are ``s`` and NorMuon's rows; for M, U and W see ``passes.torch_passes``.

    M <- M + (1 - momentum) (G - M)
    U  = G + momentum (M - G)  if nesterov else M
    O  = NewtonSchulz(U / ||U||_F)
    W <- W (1 - lr weight_decay) - lr s(rows, cols) O

Rows are outputs, columns inputs. A matrix whose gradient is zero everywhere does not move: M, W, and V below stay.
Keller Jordan, Muon (2024), https://kellerjordan.github.io/posts/muon/, with the names of ``torch.optim.Muon``. With
``variant`` "normuon", between the last two lines:

    V <- beta2 V + (1 - beta2) row means of O * O        one number per row
    O <- sqrt(min(rows, cols)) N / ||N||_F               where N = O / sqrt(V), row by row

Li et al., NorMuon (2025), arXiv:2510.05491, Algorithm 1. The norm is that of an exactly orthogonal matrix, so that
``s`` means the same in both variants; with "match_rms_adamw" the update is the paper's:
0.2 sqrt(rows cols) N / ||N||_F.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds_muon.layout import Layout

# Guards the division by the root of a row's second moment, which is zero for a row that never had a gradient. O does
# not depend on the scale of the gradient, so this number breaks no scale invariance.
ROW_EPS = 1e-10


def update_scale(adjust_lr_fn: str, rows: int, cols: int) -> float:
    """``s(rows, cols)``: the factor from an orthogonalized matrix to the update, named as in ``torch.optim.Muon``.

    Rows are outputs and columns inputs, however the matrix is stored.

    Raises:
        ValueError: an unknown ``adjust_lr_fn``.
    """
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / max(cols, 1)))
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    if adjust_lr_fn == "none":
        return 1.0
    raise ValueError(f'adjust_lr_fn = {adjust_lr_fn!r}: choose "original", "match_rms_adamw" or "none"')


def advance_row_variance(
    orthogonal: Tensor, row_variance: Tensor, *, beta2: float, layout: Layout = "out_in"
) -> tuple[Tensor, Tensor]:
    """NorMuon's second moments of the rows after one step, and the factor that each row of O gets from them.

    Args:
        orthogonal: (batch, rows, cols), any float dtype; not modified.
        row_variance: (batch, rows) fp32; not modified.
        beta2: weight of the past, in [0, 1).
        layout: of the matrices. With "in_out", columns take the place of rows.

    Returns:
        The new ``row_variance``, and the factors: (batch, rows, 1) fp32, or (batch, 1, cols) with "in_out". A zero
        matrix gets zeros.
    """
    if layout == "in_out":
        advanced, factors = advance_row_variance(orthogonal.mT, row_variance, beta2=beta2)
        return advanced, factors.mT
    _, rows, cols = orthogonal.shape
    # One matrix at a time, because a batch might be summed in another order.
    norms = [torch.linalg.vector_norm(matrix, dim=-1, dtype=torch.float32) for matrix in orthogonal]
    squares = torch.stack(norms).to(torch.float64).square_()
    advanced = (row_variance.to(torch.float64) * beta2).add_(squares / max(cols, 1), alpha=1 - beta2).to(torch.float32)
    root = advanced.to(torch.float64).sqrt_().add_(ROW_EPS)
    norm = (squares / root.square()).sum(dim=-1, keepdim=True).sqrt_()
    # A NaN stays a NaN: it must not pass for zero.
    factors = torch.where(norm == 0, 0, math.sqrt(min(rows, cols)) / (root * norm))
    return advanced, factors.to(torch.float32).unsqueeze(-1)
