"""The Newton-Schulz iteration, written over four batched operations.

Both forms apply the same polynomial to the singular values of X. The standard form multiplies X in every step. The Gram
form (Dao-AILab, gram-newton-schulz, 2026) iterates on the small Gram matrix R = X X^T and multiplies X only before a
restart and at the end, which saves work when X is wide. A *block* is the steps between two multiplications of X: blocks
of one step are the standard form. A backend runs the blocks with its own operations.

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
# restarts from R = X X^T. In fp32 not at all, because users choose fp32 for accuracy. In half precision the result has
# an error of 0.01 and more anyway. But a singular value that is pushed beyond the reach of the next polynomial grows
# without bound: seen at 0.3 in fp16 and 0.1 in bf16, on 8 x 64 matrices with one strong direction.
_ALLOWED_GROWTH = {torch.float32: 0.0, torch.float16: 0.07, torch.bfloat16: 0.05}
# Most steps in a block after the first block. Measured: a third step doubles or triples the error, with any table.
_LATER_STEPS = 2

Block = tuple[Triple, ...]
"""Steps of the iteration between two multiplications of X."""


@dataclass(frozen=True)
class Iteration:
    """An iteration on matrices of one shape, as a backend gets it. Equal iterations launch the same work.

    Attributes:
        blocks: all steps in order: see the function ``blocks``.
        dtype: of the iteration and its result.
        eps: guards the division by a zero norm, and nothing else.
    """

    blocks: tuple[Block, ...]
    dtype: torch.dtype
    eps: float

    @property
    def form(self) -> str:
        """``"standard"`` if X is multiplied in every step, else ``"gram"``."""
        return "gram" if any(len(block) > 1 for block in self.blocks) else "standard"

    @property
    def buffers(self) -> int:
        """How many (batch, m, m) buffers the products can use in turns.

        The standard form needs R and W. The Gram form writes up to four others until it has last read a result.
        """
        return 5 if self.form == "gram" else 2

    def flops(self, rows: int, cols: int) -> int:
        """Floating-point operations for one matrix, if symmetric products compute one triangle. They balance the ranks.

        Five steps take ``20 m^3`` for a square matrix and, with one restart, ``14 m^3 + 6 m^2 n`` for a wide or tall
        one. A triple with c = 0 saves ``m^3``, because it needs no ``R^2``.
        """
        m, n = sorted((rows, cols))
        multiplications, steps = len(self.blocks), [triple for block in self.blocks for triple in block]
        polynomials = sum(c != 0 for _, _, c in steps)
        return (polynomials + 3 * (len(steps) - multiplications)) * m**3 + 3 * multiplications * m * m * n

    def run(self, x: Tensor, ops: Operations, other: Tensor | None = None) -> Tensor:
        """Apply the polynomials of all steps, one after another, to the singular values of X.

        With ``W = a I + b R + c R^2`` a step maps ``X`` to ``W X`` and ``R`` to ``W R W``. Within a block, ``Q``
        collects the factors that X has yet to be multiplied with. These matrices are polynomials in R, hence symmetric,
        and commute.

        Args:
            x: (batch, m, n) with m <= n; not modified without ``other``.
            ops: the products.
            other: (batch, m, n) memory to be overwritten. Multiplications of X go to ``other`` and ``x`` in turns, and
                nothing of that size is allocated. The result is ``other`` if their number is odd, else ``x``.
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
    """The products of the iteration. No operand is modified. Results may have any strides.

    Symmetric products may compute one triangle and mirror it.
    """

    def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
        """``a @ b``, where the result is known to be symmetric."""

    def polynomial(self, r: Tensor, triple: Triple) -> Tensor:
        """``a I + b R + c R^2`` for ``triple = (a, b, c)``. With c = 0 it needs no product."""

    def product(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """``a @ b``, in ``out`` if given."""

    def step(self, r: Tensor, triple: Triple, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``(a I + b R + c R^2) X``, at least as accurate as ``product(polynomial(r, triple), x, out)``."""


def blocks(rows: int, cols: int, triples: Sequence[Triple], dtype: torch.dtype, method: str) -> tuple[Block, ...]:
    """The blocks for a (rows, cols) matrix: in the Gram form if ``method`` is "gram" and it pays, else standard."""
    if gram_form_pays(rows, cols) and method == "gram":
        return gram_blocks(triples, dtype)
    return standard_blocks(triples)


def standard_blocks(triples: Sequence[Triple]) -> tuple[Block, ...]:
    """Every step as a block."""
    return tuple((triple,) for triple in triples)


def gram_form_pays(rows: int, cols: int) -> bool:
    """Whether the long side is at least twice the short one, or 1.5 times in large matrices: measured on H100 in fp16.

    Both forms take as many operations at ``rows == cols``, but more of the Gram form's are small products. The standard
    form is as accurate. The Gram form is less so up to 16 rows: of random matrices with 4 rows and condition numbers
    from 10 to 1e4, one in seven was off by more than 0.01 in fp16; with 24 or 32 rows, none.
    """
    m, n = sorted((rows, cols))
    return m > 16 and n >= (1.5 if m >= 1536 else 2) * m


def gram_blocks(triples: Sequence[Triple], dtype: torch.dtype) -> tuple[Block, ...]:
    """The blocks of the Gram form, which restarts from ``R = X X^T`` at each.

    A step multiplies the rounding error on the small eigenvalues of R by ``a^2``, so the first block may go on while
    ``eps * product of a^2`` stays small. In fp16 the blocks are three and two steps with the ``quintic`` table, and
    two, two, one with ``you`` and ``polar_express``, whose first steps have a = 4 and 8. In bf16 the first block is one
    step shorter, and in fp32 every step is a block. With longer blocks the iteration diverges on matrices with a
    fast-falling spectrum.
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
