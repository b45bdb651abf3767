"""How the Triton kernels cut a product into blocks: the tiles, and which of them is the fastest for a batch.

A model of the time, without Triton. The result of a matrix is the same with each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ds_muon.kernels.launch import ceil_div


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts a product into blocks.

    Attributes:
        rows, cols: block of the result that one program computes at a time: a square, or two of them side by side.
        depth: length of K that is in flight per stage.
        warps, stages: warps of a program, and buffers of its pipeline.
        programs_per_sm: programs that registers and shared memory admit on one multiprocessor: the persistent grid of
            a descriptor tile. 0 for a pointer tile, which starts one program per block.
        pieces: 1 or 4 column slices in which a square of the result is stored. The buffer for stores holds one: with
            four, two programs of the 128 x 128 tile live on one multiprocessor.
        flatten: make one loop of blocks and K.
        quarters: four programs for each block that is more than one per multiprocessor. Only symmetric products.
    """

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    programs_per_sm: int = 0
    pieces: int = 1
    flatten: bool = False
    quarters: bool = False

    @property
    def descriptors(self) -> bool:
        return self.programs_per_sm > 0

    def count(self, m: int, n: int, symmetric: bool) -> int:
        """Blocks of one (m, n) result; of a symmetric one, those with something on or below the diagonal."""
        if not symmetric:
            return ceil_div(m, self.rows) * ceil_div(n, self.cols)
        return sum(ceil_div((row + 1) * self.rows, self.cols) for row in range(ceil_div(m, self.rows)))


# Measured on H100 and H200: SMALL wins up to sides of 1024, WIDE, which reads a quarter less from L2, beyond and in
# plain products. QUARTERS is for what SMALL does in a round and a bit.
SMALL = Tile(128, 128, 64, warps=4, stages=3, programs_per_sm=2, pieces=4)
WIDE = Tile(128, 256, 64, warps=8, stages=3, programs_per_sm=1, flatten=True)
QUARTERS = replace(SMALL, quarters=True)
# Any GPU. Eight warps leave registers for the addresses of ragged rows, and for fp32 products without tensor cores.
POINTERS = Tile(128, 128, 32, warps=8, stages=4)
POINTERS_FP32 = Tile(128, 128, 16, warps=8, stages=3)


def tiles_for(capability: tuple[int, int], dtype: torch.dtype) -> tuple[Tile, ...]:
    """All that ``choose_tile`` chooses from on a GPU of this compute capability."""
    if dtype == torch.float32:
        return (POINTERS_FP32,)
    return (SMALL, WIDE, QUARTERS) if capability[0] == 9 else (POINTERS,)


@lru_cache(maxsize=1024)
def choose_tile(
    batch: int,
    m: int,
    n: int,
    k: int,
    *,
    symmetric: bool,
    sms: int,
    capability: tuple[int, int],
    dtype: torch.dtype,
) -> Tile:
    """The tile for ``batch`` products of size (m, k) by (k, n) on a GPU with ``sms`` multiprocessors.

    Compares the time of the busiest multiprocessor, in units of one 128 x 128 block with a multiprocessor of its own.
    """
    only, *others = tiles_for(capability, dtype)
    if not others:
        return only
    # Two small blocks share a multiprocessor at half the speed each. A wide block is faster than the two small ones
    # that it replaces where the operands of small ones overrun L2.
    longest = max(m, k) if symmetric else max(m, n, k)
    if symmetric:
        wide_block = 1.65 if longest >= 2048 else 2.0
    else:
        wide_block = 1.65 if longest > 1024 else 1.9 if longest > 512 else 2.0
    small, wide = (batch * tile.count(m, n, symmetric) for tile in (SMALL, WIDE))
    # By half rounds, for the other half of a batch fills what is left of the last one.
    costs = {SMALL: ceil_div(2 * small, sms) / 2, WIDE: wide_block * ceil_div(2 * wide, sms) / 2}
    if symmetric and sms < small and 4 * (small - sms) <= sms:
        costs[QUARTERS] = 1.4
    return min(costs, key=lambda tile: costs[tile])
