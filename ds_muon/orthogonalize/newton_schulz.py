"""The Newton-Schulz iteration, written over four batched operations.

Both forms apply the same polynomial to the singular values of X. ``standard`` multiplies X in every step. ``gram``
(Dao-AILab, gram-newton-schulz, 2026) iterates on the small Gram matrix R = X X^T and multiplies X only where it
restarts and at the end, which saves work when X is wide. A backend runs it with its own operations.

Shapes: X is (batch, m, n) with m <= n; R, W, Q are (batch, m, m). Everything is in one dtype; products of
half-precision operands accumulate in fp32, unless the user has allowed torch less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ds_muon.orthogonalize.coefficients import Triple

# How large the rounding error of a Gram matrix may grow, relative to its largest eigenvalue, before the iteration
# starts again from R = X X^T. In fp32, which is chosen for its accuracy, not at all. In half precision, where the
# result has its own error of 0.01 and more, it must not push a singular value beyond the reach of the next polynomial,
# from where it grows without bound: seen at 0.3 in fp16 and 0.1 in bf16, on 8 x 64 matrices of one strong direction.
_ALLOWED_GROWTH = {torch.float32: 0.0, torch.float16: 0.07, torch.bfloat16: 0.05}
# Steps of a block after the first one. Measured: a third one doubles or triples the error, with any table.
_LATER_STEPS = 2

Iterate = Callable[["Operations", Tensor, Tensor | None], Tensor]
"""``standard`` or ``gram`` with the coefficients settled: gets the products, X, and memory of its shape or None."""


@dataclass(frozen=True)
class Iteration:
    """An iteration on a batch of matrices, as a backend gets it.

    Attributes:
        iterate: gets X, transposed where the matrices are tall.
        passes: how often ``iterate`` multiplies X.
        squares: a (batch, m, m) result of the products may be overwritten by the result so many later.
        key: says which iteration ``iterate`` is.
        dtype: of the iteration.
        eps: guards the division by a zero norm, and nothing else.
    """

    iterate: Iterate
    passes: int
    squares: int
    key: Hashable
    dtype: torch.dtype
    eps: float


class Operations(Protocol):
    """The products that the iteration is written over. No operand is modified.

    The symmetric ones may compute one triangle only and mirror it. Results may have any strides.
    """

    def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
        """``a @ b``, known to be symmetric."""

    def polynomial(self, r: Tensor, triple: Triple) -> Tensor:
        """``a I + b R + c R^2`` for ``triple = (a, b, c)``. With c = 0 it needs no product."""

    def product(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """``a @ b``, in ``out`` if that is given."""

    def step(self, r: Tensor, triple: Triple, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``(a I + b R + c R^2) X``: what ``product(polynomial(r, triple), x, out)`` is, or something more accurate."""


class Backend(Protocol):
    """Whoever runs an iteration on a batch: normalization, products, and the memory for both."""

    compact: bool
    """Whether a result of ``run`` has storage of its own, and not a piece of what ``run`` worked in."""

    def alone(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a matrix must be a batch of its own, for its result might depend on what shares its batch."""

    def workspace(self, rows: int, cols: int, dtype: torch.dtype, squares: int) -> int:
        """Bytes that ``run`` allocates for each (rows, cols) matrix of a batch, its result included.

        Args:
            squares: of the ``Iteration``.
        """

    def run(self, matrices: Sequence[Tensor], iteration: Iteration) -> Tensor:
        """Normalize the matrices, (rows, cols) in fp32 each, and iterate on them as one batch.

        Each is divided by its largest magnitude, then by its Frobenius norm. The first division keeps the squares of
        the second in range, so that U and c U give the same result but for rounding, for any scale fp32 can hold.

        Returns:
            (batch, rows, cols) of the iteration's dtype, in storage that shares nothing with ``matrices``.
        """

    def release(self) -> None:
        """Forget what is kept from one ``run`` to the next."""

    def for_trial(self, device: torch.device, dtype: torch.dtype) -> Sequence[Backend]:
        """Backends that among them use each way of computing a product that this one may choose there."""


def standard(x: Tensor, triples: Sequence[Triple], ops: Operations, other: Tensor | None = None) -> Tensor:
    """``X <- (a I + b R + c R^2) X`` with ``R = X X^T``, once per triple.

    Args:
        x: (batch, m, n), not modified without ``other``.
        other: memory of its shape. The passes go to it and to ``x`` in turns, and nothing of that size is allocated:
            the result lies in ``other`` after an odd number of passes, in ``x`` after an even one.
    """
    return _iterate(x, _blocks(triples, x.dtype, "standard"), ops, other)


def gram(x: Tensor, triples: Sequence[Triple], ops: Operations, other: Tensor | None = None) -> Tensor:
    """The same polynomial through the Gram matrix, in ``restart_blocks``."""
    return _iterate(x, _blocks(triples, x.dtype, "gram"), ops, other)


def passes(triples: Sequence[Triple], dtype: torch.dtype, form: str) -> int:
    """How often X is multiplied in ``form``, ``"standard"`` or ``"gram"``."""
    return len(_blocks(triples, dtype, form))


def squares(form: str) -> int:
    """See ``Iteration``. The standard form has R and W; the Gram form makes up to five between two uses of one."""
    return 5 if form == "gram" else 2


def _blocks(triples: Sequence[Triple], dtype: torch.dtype, form: str) -> list[list[Triple]]:
    return restart_blocks(triples, dtype) if form == "gram" else [[triple] for triple in triples]


def _iterate(x: Tensor, blocks: Sequence[Sequence[Triple]], ops: Operations, other: Tensor | None) -> Tensor:
    """With ``W = a I + b R + c R^2`` a step maps ``X`` to ``W X`` and ``R`` to ``W R W``.

    Within a block, ``Q`` collects the factors that X has yet to be multiplied with. All of them are polynomials in R,
    hence symmetric, and commute. A block of one step is the standard form.
    """
    for block in blocks:
        r = ops.symmetric(x, x.mT)
        if len(block) == 1:
            product = ops.step(r, block[0], x, other)
        else:
            q = w = ops.polynomial(r, block[0])
            for triple in block[1:]:
                r = ops.symmetric(w, ops.symmetric(w, r))
                w = ops.polynomial(r, triple)
                q = ops.symmetric(w, q)
            product = ops.product(q, x, other)
        x, other = product, None if other is None else x
    return x


def restart_blocks(triples: Sequence[Triple], dtype: torch.dtype) -> list[list[Triple]]:
    """The steps between restarts of the Gram form.

    A step multiplies the rounding error on the small eigenvalues of R by ``a^2``, so the first block may go on while
    ``eps * product of a^2`` stays small. In fp16 these are three steps with the ``quintic`` table, then two; and
    two, two, one with ``you`` and ``polar_express``, whose first steps have a = 4 and 8. In bf16 the first block is
    one step shorter, and in fp32 every step is a block. Going on for longer makes the iteration diverge on matrices
    with a fast-falling spectrum.
    """
    blocks: list[list[Triple]] = []
    growth = math.inf
    for triple in triples:
        later = len(blocks) > 1 and len(blocks[-1]) == _LATER_STEPS
        if growth > _ALLOWED_GROWTH[dtype] or later:
            blocks.append([])
            growth = torch.finfo(dtype).eps / 2
        blocks[-1].append(triple)
        growth *= triple[0] ** 2
    return blocks


def flops(rows: int, cols: int, triples: Sequence[Triple], dtype: torch.dtype, method: str) -> int:
    """Floating-point operations of one matrix when symmetric products compute one triangle.

    The measure by which work is balanced over ranks: at five steps ``20 m^3`` for a square and, with one restart,
    ``14 m^3 + 6 m^2 n`` for a wide or tall matrix; less ``m^3`` for each triple with c = 0, which needs no ``R^2``.
    """
    m, n = sorted((rows, cols))
    polynomials = sum(c != 0 for _, _, c in triples) * m**3
    if uses_gram(rows, cols, method):
        blocks = len(restart_blocks(triples, dtype))
        return polynomials + 3 * (len(triples) - blocks) * m**3 + 3 * blocks * m * m * n
    return polynomials + 3 * len(triples) * m * m * n


def uses_gram(rows: int, cols: int, method: str) -> bool:
    """``"gram"`` pays from twice as long as wide on, for large matrices from 1.5 times: measured on H100 in fp16.

    The operations are equal in number at ``rows == cols``, but more of those of the Gram form are small products. Where
    the standard form is faster it is as accurate. Up to 16 rows the Gram form is not: of random matrices with 4 rows
    and condition numbers from 10 to 1e4 one in seven was off by more than 0.01 in fp16, of those with 24 or 32 none.
    """
    m, n = sorted((rows, cols))
    return method == "gram" and m > 16 and n >= (1.5 if m >= 1536 else 2) * m
