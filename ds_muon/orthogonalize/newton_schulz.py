"""The Newton-Schulz iteration, written over four batched operations.

Both forms apply the same polynomial to the singular values of X. The standard one multiplies X in every step. The Gram
form (Dao-AILab, gram-newton-schulz, 2026) iterates on the small Gram matrix R = X X^T and multiplies X only where it
restarts and at the end, which saves work when X is wide. Which one it is, and all that follows from it, is said by the
blocks in which the steps run. A backend runs them with its own operations.

Shapes: X is (batch, m, n) with m <= n; R, W, Q are (batch, m, m). Everything is in one dtype; products of
half-precision operands accumulate in fp32, unless the user has allowed torch less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

Block = tuple[Triple, ...]
"""Steps of the iteration between two multiplications of X."""


@dataclass(frozen=True)
class Iteration:
    """An iteration on matrices of one shape, as a backend gets it. Equal ones launch the same work.

    Attributes:
        blocks: the steps, in the order in which they run: see ``blocks``.
        dtype: of the iteration and its result.
        eps: guards the division by a zero norm, and nothing else.
    """

    blocks: tuple[Block, ...]
    dtype: torch.dtype
    eps: float

    @property
    def form(self) -> str:
        """``"standard"``, where X is multiplied in every step, else ``"gram"``."""
        return "gram" if any(len(block) > 1 for block in self.blocks) else "standard"

    @property
    def passes(self) -> int:
        """How often X is multiplied."""
        return len(self.blocks)

    @property
    def squares(self) -> int:
        """A (batch, m, m) result of the products may be overwritten by the result so many later.

        The standard form has R and W; the Gram form makes up to five between two uses of one.
        """
        return 5 if self.form == "gram" else 2

    def flops(self, rows: int, cols: int) -> int:
        """Floating-point operations of one matrix when symmetric products compute one triangle.

        The measure by which work is balanced over ranks: at five steps ``20 m^3`` for a square and, with one restart,
        ``14 m^3 + 6 m^2 n`` for a wide or tall matrix; less ``m^3`` for each triple with c = 0, which needs no ``R^2``.
        """
        m, n = sorted((rows, cols))
        steps = [triple for block in self.blocks for triple in block]
        polynomials = sum(c != 0 for _, _, c in steps)
        return (polynomials + 3 * (len(steps) - self.passes)) * m**3 + 3 * self.passes * m * m * n

    def run(self, x: Tensor, ops: Operations, other: Tensor | None = None) -> Tensor:
        """The polynomials of all steps, one after another, of the singular values of X.

        With ``W = a I + b R + c R^2`` a step maps ``X`` to ``W X`` and ``R`` to ``W R W``. Within a block, ``Q``
        collects the factors that X has yet to be multiplied with. All of them are polynomials in R, hence symmetric,
        and commute. A block of one step is the standard form.

        Args:
            x: (batch, m, n) with m <= n; not modified without ``other``.
            ops: the products.
            other: memory of its shape. The passes go to it and to ``x`` in turns, and nothing of that size is
                allocated: the result lies in ``other`` after an odd number of passes, in ``x`` after an even one.
        """
        for block in self.blocks:
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


def blocks(rows: int, cols: int, triples: Sequence[Triple], dtype: torch.dtype, method: str) -> tuple[Block, ...]:
    """How a (rows, cols) matrix is iterated on: with ``method`` "gram", in the Gram form where that pays."""
    if pays_in_gram_form(rows, cols) and method == "gram":
        return gram_blocks(triples, dtype)
    return standard_blocks(triples)


def standard_blocks(triples: Sequence[Triple]) -> tuple[Block, ...]:
    """Every step by itself."""
    return tuple((triple,) for triple in triples)


def pays_in_gram_form(rows: int, cols: int) -> bool:
    """From twice as long as wide on, for large matrices from 1.5 times: measured on H100 in fp16.

    The operations are equal in number at ``rows == cols``, but more of those of the Gram form are small products. Where
    the standard form is faster it is as accurate. Up to 16 rows the Gram form is not: of random matrices with 4 rows
    and condition numbers from 10 to 1e4 one in seven was off by more than 0.01 in fp16, of those with 24 or 32 none.
    """
    m, n = sorted((rows, cols))
    return m > 16 and n >= (1.5 if m >= 1536 else 2) * m


def gram_blocks(triples: Sequence[Triple], dtype: torch.dtype) -> tuple[Block, ...]:
    """The steps between restarts of the Gram form.

    A step multiplies the rounding error on the small eigenvalues of R by ``a^2``, so the first block may go on while
    ``eps * product of a^2`` stays small. In fp16 these are three steps with the ``quintic`` table, then two; and
    two, two, one with ``you`` and ``polar_express``, whose first steps have a = 4 and 8. In bf16 the first block is
    one step shorter, and in fp32 every step is a block. Going on for longer makes the iteration diverge on matrices
    with a fast-falling spectrum.
    """
    found: list[Block] = []
    growth = math.inf
    for triple in triples:
        later = len(found) > 1 and len(found[-1]) == _LATER_STEPS
        if growth > _ALLOWED_GROWTH[dtype] or later:
            found.append(())
            growth = torch.finfo(dtype).eps / 2
        found[-1] += (triple,)
        growth *= triple[0] ** 2
    return tuple(found)
