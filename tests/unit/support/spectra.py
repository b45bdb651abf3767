"""Matrices that are hard for Newton-Schulz, and the error that each table of coefficients may make on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_muon.orthogonalize import Triple
from ds_muon.orthogonalize.newton_schulz import Iteration, gram_blocks, standard_blocks

# By table and condition number, in fp16: what each table allows by itself, measured on H100 for sides of 1024 and 4096
# and on CPU from sides of 96 on, times 1.3. bf16 has eight times the rounding of fp16, and all errors with it.
HALF_BOUNDS = {
    ("quintic", 1e4): 0.012, ("polar_express", 1e4): 0.019, ("you", 1e4): 0.013, ("cubic", 1e4): 0.0014,
    ("quintic", 1e7): 0.019, ("polar_express", 1e7): 0.034, ("you", 1e7): 0.020, ("cubic", 1e7): 0.0016,
    # Measured on CPU only, from sides of 96 to 1024.
    ("minimax", 1e4): 0.012, ("cubic5", 1e4): 0.0052, ("deepseekv4", 1e4): 0.20,
    ("minimax", 1e7): 0.022, ("cubic5", 1e7): 0.0067, ("deepseekv4", 1e7): 0.99,
}  # fmt: skip
# Rounding noise of the smallest directions that all steps have raised to 1 differs from other such noise by 1.4.
_NOISE = 1.4


def half_bound(table: str, condition: float, dtype: torch.dtype) -> float:
    return min(_NOISE, HALF_BOUNDS[table, condition] * (8 if dtype == torch.bfloat16 else 1))


def magnified(table: str) -> float:
    """How often a table may make the error that five steps may: ten raise the noise of small directions for longer."""
    return 4.0 if table == "deepseekv4" else 1.0


def gaussian(rows: int, cols: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def log_uniform(rows: int, cols: int, condition: float, seed: int = 0) -> Tensor:
    """Singular values spread evenly on a logarithmic scale."""
    side = min(rows, cols)
    left, right = (torch.linalg.qr(gaussian(n, side, seed + n).double())[0] for n in (rows, cols))
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), side, dtype=torch.float64)
    return ((left * values) @ right.mT).float()


def dominated(rows: int, cols: int, rest: float, seed: int) -> Tensor:
    """One direction that outweighs the others: what the gradient of a small or badly scaled layer looks like."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(rows, 1, generator=generator) @ torch.randn(1, cols, generator=generator)
    noise = torch.randn(rows, cols, generator=generator)
    return first / first.norm() + rest * noise / noise.norm()


def rank_deficient(rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Half of the rows twice, which is exactly deficient; and a product of rank 7, rounded."""
    half = gaussian(rows // 2, cols)
    return torch.cat([half, half]), gaussian(rows, 7) @ gaussian(7, cols, seed=1)


def distance(a: Tensor, b: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def rounded_input(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The normalized matrix in the dtype of the iteration: what no iteration in it can do better than."""
    unit = matrix / matrix.abs().max()
    return (unit / unit.norm()).to(dtype)


def iteration_of(form: str, triples: Sequence[Triple], dtype: torch.dtype) -> Iteration:
    blocks = gram_blocks(triples, dtype) if form == "gram" else standard_blocks(triples)
    return Iteration(blocks, dtype, eps=0.0)
