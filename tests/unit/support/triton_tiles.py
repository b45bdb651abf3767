"""What all tests of the Triton backend share: its tiles, or small ones for Triton's interpreter, and matrices.

On a GPU the shipped tiles run; elsewhere the interpreter runs small ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.unit.support.interpreter import GPU, defining_kernels, interpreting

with defining_kernels():
    from ds_muon.orthogonalize import triton_backend
    from ds_muon.orthogonalize.tiles import POINTERS, POINTERS_FP32, QUARTERS, SMALL, WIDE, Tile

DEVICE = torch.device("cuda" if GPU else "cpu")
HOPPER = GPU and torch.cuda.get_device_capability()[0] == 9
# The interpreter's bf16 products are wrong (Triton 3.6): there bf16 needs a GPU.
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if GPU else [torch.float32, torch.float16]
if GPU:
    TILES = {"pointers": POINTERS, "pointers_fp32": POINTERS_FP32}
    TILES |= {"small": SMALL, "wide": WIDE, "quarters": QUARTERS} if HOPPER else {}
else:
    TILES = {
        "pointers": Tile(32, 32, 32, warps=4, stages=3),
        "pointers_fp32": Tile(32, 32, 32, warps=4, stages=3),
        "small": Tile(32, 32, 32, warps=4, stages=3, programs_per_sm=2, pieces=4),
        "wide": Tile(32, 64, 32, warps=4, stages=3, programs_per_sm=1, flatten=True),
        "quarters": Tile(32, 32, 32, warps=4, stages=3, programs_per_sm=2, pieces=4, quarters=True),
    }
# Each dtype in the tiles that it is given: blocks of fp32 overflow the shared memory for which the others are cut.
CASES = [
    pytest.param(tile, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for (name, tile), dtype in itertools.product(TILES.items(), DTYPES)
    if (dtype == torch.float32) == (name == "pointers_fp32")
]
# What does not hang on the dtype is tried in one of them: the interpreter is slow.
ONE_DTYPE = CASES if GPU else [case for case in CASES if case.values[1] == torch.float16]
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter wants a tensor where a GPU takes an address."""
    if GPU:
        yield
        return

    def describe(x: Tensor, rows: int, cols: int) -> object:
        return triton_backend.TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, cols])

    monkeypatch.setattr(triton_backend, "describe", describe)
    with interpreting():
        yield


def gaussian(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def unit(batch: int, m: int, n: int, dtype: torch.dtype, tall: bool, seed: int = 0) -> Tensor:
    """(batch, m, n) of Frobenius norm 1 each; ``tall``: the transpose of what lies in memory."""
    x = gaussian(batch, n, m, seed=seed).mT if tall else gaussian(batch, m, n, seed=seed)
    return (x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float64)).to(dtype)


def by_torch(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, scalars: tuple[float, float, float], _: bool, tile: Tile
) -> None:
    product = a.float() @ b.float()
    if c is not None:
        alpha, beta, identity = scalars
        product = alpha * product + beta * c.float() + identity * torch.eye(out.shape[1], device=DEVICE)
    out.copy_(product)
