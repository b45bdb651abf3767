"""The Newton-Schulz iteration, written over four batched operations.

Both forms apply the same polynomial to the singular values of X. ``standard`` multiplies X in every step. ``gram``
(Dao-AILab, gram-newton-schulz, 2026) iterates on the small Gram matrix R = X X^T and multiplies X only where it
restarts and at the end, which saves work when X is wide. A backend is a table of the four operations.

Shapes: X is (batch, m, n) with m <= n; R, Z, Q, T are (batch, m, m). Everything is in one dtype; products of
half-precision operands accumulate in fp32, unless the user has allowed torch less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ds_muon.orthogonalize.coefficients import Triple

# How large the rounding error of a Gram matrix may grow, relative to its largest eigenvalue, before the iteration
# starts again from R = X X^T. In fp32, which is chosen for its accuracy, hardly at all. In half precision, where the
# result has its own error of 0.01 and more, it must not push a singular value beyond the reach of the next polynomial,
# from where it grows without bound: seen at 0.3 in fp16 and 0.1 in bf16, on 8 x 64 matrices of one strong direction.
_ALLOWED_GROWTH = {torch.float32: 5e-7, torch.float16: 0.07, torch.bfloat16: 0.05}


class Operations(Protocol):
    """A backend: four products, and what comes before them. No operand is modified.

    The symmetric products may compute one triangle only and mirror it. Results may have any strides.
    """

    replays: bool
    """Whether its launches are worth replaying from a CUDA graph."""

    def alone(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a matrix must be a batch of its own, for its result might depend on what shares its batch."""

    def normalize(self, matrices: Sequence[Tensor], dtype: torch.dtype, eps: float) -> Tensor:
        """Each (rows, cols) fp32 matrix over its largest magnitude, then over its Frobenius norm, as one batch.

        The first division keeps the squares of the second in range, so that U and c U give the same result for any
        scale fp32 can hold. ``eps`` guards the division by a zero norm, and nothing else.

        Returns:
            (batch, rows, cols) of ``dtype``, in storage that shares nothing with ``matrices``.
        """

    def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
        """``a @ b``, known to be symmetric."""

    def symmetric_plus(self, a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float) -> Tensor:
        """``alpha a @ b + beta c``, known to be symmetric."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """``a @ b``."""

    def product_plus(self, a: Tensor, b: Tensor, c: Tensor, *, beta: float) -> Tensor:
        """``a @ b + beta c``."""


def standard(x: Tensor, triples: Sequence[Triple], ops: Operations) -> Tensor:
    """``X <- a X + (b R + c R^2) X`` with ``R = X X^T``, once per triple."""
    for a, b, c in triples:
        r = ops.symmetric(x, x.mT)
        x = ops.product_plus(_tail(r, b, c, ops), x, x, beta=a)
    return x


def gram(x: Tensor, triples: Sequence[Triple], ops: Operations) -> Tensor:
    """The same polynomial through the Gram matrix, in ``restart_blocks``.

    With ``p(R) = a I + Z``, ``Z = b R + c R^2``, a step maps ``X`` to ``p(R) X`` and ``R`` to ``p(R) R p(R)``; ``Q``
    collects the factors that X has yet to be multiplied with. All of them are polynomials in R, hence symmetric.
    """
    for block in restart_blocks(triples, x.dtype):
        if len(block) == 1:
            # The same work, with one rounding less: a X is not folded into Q.
            x = standard(x, block, ops)
            continue
        r = ops.symmetric(x, x.mT)
        q = None
        for index, (a, b, c) in enumerate(block):
            z = _tail(r, b, c, ops)
            q = _plus_identity(z, a) if q is None else ops.symmetric_plus(z, q, q, alpha=1.0, beta=a)
            if index < len(block) - 1:
                t = ops.symmetric_plus(r, z, r, alpha=1.0, beta=a)
                r = ops.symmetric_plus(z, t, t, alpha=1.0, beta=a)
        assert q is not None
        x = ops.product(q, x)
    return x


def restart_blocks(triples: Sequence[Triple], dtype: torch.dtype) -> list[list[Triple]]:
    """The steps between restarts of the Gram form.

    A step multiplies the rounding error on the small eigenvalues of R by ``a^2``, so a block may go on while
    ``eps * product of a^2`` stays small. With the ``quintic`` table these are three steps in fp16, two in bf16 and one
    in fp32; with ``polar_express``, whose first steps have a = 8 and 4, two in fp16 and one in bf16. Going on for
    longer makes the iteration diverge on matrices with a fast-falling spectrum.
    """
    blocks: list[list[Triple]] = []
    growth = math.inf
    for triple in triples:
        if growth > _ALLOWED_GROWTH[dtype]:
            blocks.append([])
            growth = torch.finfo(dtype).eps / 2
        blocks[-1].append(triple)
        growth *= triple[0] ** 2
    return blocks


def _tail(r: Tensor, b: float, c: float, ops: Operations) -> Tensor:
    """``b R + c R^2``; cubic coefficients (c = 0) need no product."""
    return ops.symmetric_plus(r, r, r, alpha=c, beta=b) if c else r * b


def _plus_identity(z: Tensor, a: float) -> Tensor:
    # With the strides of z, which may leave room between rows: what reads z well reads q well.
    q = torch.empty_strided(z.shape, z.stride(), dtype=z.dtype, device=z.device).copy_(z)
    q.diagonal(dim1=-2, dim2=-1).add_(a)
    return q


def flops(rows: int, cols: int, triples: Sequence[Triple], dtype: torch.dtype, method: str) -> int:
    """Floating-point operations of one matrix when symmetric products compute one triangle.

    The measure by which work is balanced over ranks: at five steps ``20 m^3`` for a square and, with one restart,
    ``14 m^3 + 6 m^2 n`` for a wide or tall matrix.
    """
    m, n = sorted((rows, cols))
    if uses_gram(rows, cols, method):
        blocks = len(restart_blocks(triples, dtype))
        return (4 * len(triples) - 3 * blocks) * m**3 + 3 * blocks * m * m * n
    return len(triples) * (m**3 + 3 * m * m * n)


def uses_gram(rows: int, cols: int, method: str) -> bool:
    """``"gram"`` pays for wide and tall matrices; a square one is faster and more accurate in the standard form."""
    return method == "gram" and rows != cols
