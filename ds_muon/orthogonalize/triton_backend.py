"""The four operations in Triton: one launch for a whole batch, and half the work for a symmetric product.

Import this module only where Triton is installed.

The result of a matrix does not depend on its batch: every tile accumulates in fp32 along all of K, upwards, and ends in
the same expression (``triton_kernels``). ``choose_tile`` may therefore look at the batch without changing a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ds_muon.orthogonalize import triton_kernels

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # an older Triton: every tile goes through pointers
    TensorDescriptor = None


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts a product into blocks.

    Attributes:
        rows, cols: block of the result that one program computes at a time.
        depth: length of K that is in flight per stage.
        warps, stages: warps of a program, and buffers of its pipeline.
        programs_per_sm: programs that registers and shared memory admit on one multiprocessor: the persistent grid of
            a descriptor tile. 0 for a pointer tile, which starts one program per block.
        pieces: 1 or 4 column slices in which a square of the result is stored. The buffer for stores holds one: with
            four, two programs of the 128 x 128 tile live on one multiprocessor.
        flatten: make one loop of blocks and K. Only plain products: Triton 3.6 cannot flatten around a branch, and a
            symmetric product needs one at the diagonal.
    """

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    programs_per_sm: int = 0
    pieces: int = 1
    flatten: bool = False

    @property
    def descriptors(self) -> bool:
        return self.programs_per_sm > 0

    def count(self, m: int, n: int, symmetric: bool) -> int:
        """Blocks of one (m, n) result; of a symmetric one, those with something on or below the diagonal."""
        if not symmetric:
            return _ceil_div(m, self.rows) * _ceil_div(n, self.cols)
        bands, rest = divmod(_ceil_div(m, self.rows), self.cols // self.rows)
        return self.cols // self.rows * bands * (bands + 1) // 2 + rest * (bands + 1)


# Measured on H100 in kernels of this form: SMALL wins up to sides of 1024 and where blocks are few, WIDE, which reads
# a quarter less from L2, elsewhere.
SMALL = Tile(128, 128, 64, warps=4, stages=3, programs_per_sm=2, pieces=4)
WIDE = Tile(128, 256, 64, warps=8, stages=3, programs_per_sm=1, flatten=True)
# Any GPU. Eight warps leave registers for the addresses of ragged rows, and for fp32 products without tensor cores.
POINTERS = Tile(128, 128, 32, warps=8, stages=4)
POINTERS_FP32 = Tile(128, 128, 16, warps=8, stages=3)

# Most parts in which a matrix is normalized, and elements that a program handles at a time.
_PARTS = 256
_BLOCK = 4096

# Rows of blocks that are worked on together, so that they share operands in L2. A multiple of cols / rows.
_GROUP = 8


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
    if dtype == torch.float32:
        return POINTERS_FP32
    if capability[0] != 9 or TensorDescriptor is None:
        return POINTERS
    small_blocks = batch * SMALL.count(m, n, symmetric)
    wide_blocks = batch * WIDE.count(m, n, symmetric)
    # Two small blocks share a multiprocessor at half the speed each. A wide block is faster than the two small ones
    # that it replaces where the operands of small ones overrun L2's bandwidth.
    wide_block = 2.0 if max(m, n, k) <= (2048 if symmetric else 1024) else 1.65
    return SMALL if _ceil_div(small_blocks, sms) <= wide_block * _ceil_div(wide_blocks, sms) else WIDE


class TritonOperations:
    """See ``newton_schulz.Operations``. Needs a GPU, but for Triton's interpreter.

    Tensors are (batch, m, n) in bf16, fp16 or fp32, with any strides: a transposed operand is read where it lies. No
    operand is modified. A result whose C, or else B, is a transposed tensor is transposed as well, so that a tall
    matrix stays in its own storage throughout. Symmetric results equal their transpose exactly, if C does.
    """

    # A launch takes the host up to 0.1 ms.
    replays = True

    def alone(self, device: torch.device, dtype: torch.dtype) -> bool:
        return False

    def normalize(self, matrices: Sequence[Tensor], dtype: torch.dtype, eps: float) -> Tensor:
        return normalize(matrices, dtype, eps)

    def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
        return matmul(a, b, symmetric=True)

    def symmetric_plus(self, a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float) -> Tensor:
        return matmul(a, b, c, alpha=alpha, beta=beta, symmetric=True)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return matmul(a, b)

    def product_plus(self, a: Tensor, b: Tensor, c: Tensor, *, beta: float) -> Tensor:
        return matmul(a, b, c, beta=beta)


def normalize(matrices: Sequence[Tensor], dtype: torch.dtype, eps: float) -> Tensor:
    """See ``newton_schulz.Operations.normalize``.

    Two passes over the input, read where it lies. The norm is summed in fp64 and rounded once.

    Args:
        matrices: (rows, cols) fp32 tensors on one device, views of a flat buffer at any offset; not modified.
        dtype: of the result.
        eps: guards the division by a zero norm.

    Returns:
        (batch, rows, cols), with rows that start at multiples of 16 bytes, as descriptors need them.
    """
    matrices = [matrix.contiguous() for matrix in matrices]
    first = matrices[0]
    batch, (rows, cols) = len(matrices), first.shape
    out = _empty(batch, rows, cols, dtype, first.device)
    addresses = _addresses(tuple(matrix.data_ptr() for matrix in matrices), first.device)
    # How a matrix is cut, and so the order of summation, depends on its size alone.
    numel = first.numel()
    parts = min(_PARTS, 1 << (_ceil_div(numel, _BLOCK) - 1).bit_length())
    part_size = _ceil_div(numel, parts * _BLOCK) * _BLOCK
    largest = torch.empty(batch, parts, dtype=torch.float32, device=first.device)
    squares = torch.empty(batch, parts, dtype=torch.float64, device=first.device)
    constants = {"PARTS": parts, "BLOCK": _BLOCK, "num_warps": 8}
    constants["ALIGNED"] = all(matrix.data_ptr() % 16 == 0 for matrix in matrices)
    pitch = out.stride(1)
    eps = max(eps, torch.finfo(torch.float32).tiny)
    with _current(first.device):
        triton_kernels.measure[(batch * parts,)](addresses, largest, squares, numel, part_size, **constants)
        triton_kernels.scale[(batch * parts,)](
            addresses, largest, squares, out, numel, part_size, rows, cols, pitch, eps, DENSE=pitch == cols, **constants
        )
    return out


def matmul(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    symmetric: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """``alpha a @ b + beta c``, or ``a @ b`` without ``c``; see ``TritonOperations``.

    Args:
        a, b, c: (batch, m, k), (batch, k, n) and (batch, m, n), one dtype and device.
        symmetric: the result is known to be symmetric, and so is ``c``.
        tile: by ``choose_tile`` unless given.
    """
    if tile is None:
        batch, m, k = a.shape
        sms, capability = _properties(a.device)
        tile = choose_tile(batch, m, b.shape[2], k, symmetric=symmetric, sms=sms, capability=capability, dtype=a.dtype)
    kept = b if c is None else c
    if not symmetric and kept.stride(2) != 1 and kept.stride(1) == 1:
        # The transpose of the result has contiguous rows.
        return _row_major(b.mT, a.mT, None if c is None else c.mT, alpha, beta, False, tile).mT
    return _row_major(a, b, c, alpha, beta, symmetric, tile)


def _row_major(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, symmetric: bool, tile: Tile
) -> Tensor:
    batch, m, _ = a.shape
    n = b.shape[2]
    out = _empty(batch, m, n, a.dtype, a.device)
    if out.numel() > 0:
        multiply = multiply_descriptors if tile.descriptors else multiply_pointers
        with _current(a.device):
            multiply(a, b, c, out, alpha, beta, symmetric, tile)
    return out


def multiply_pointers(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float, symmetric: bool, tile: Tile
) -> None:
    """Write ``alpha a @ b + beta c`` to ``out``, whose rows are contiguous, through pointers."""
    batch, m, k = a.shape
    n = b.shape[2]
    tiles = tile.count(m, n, symmetric)
    addend = out if c is None else c if c.stride(2) == 1 else c.contiguous()
    triton_kernels.matmul_pointers[(batch * tiles,)](
        a, b, addend, out, tiles, m, n, k, alpha, beta,
        *a.stride(), *b.stride(), *addend.stride()[:2], *out.stride()[:2],
        ROWS=tile.rows, COLS=tile.cols, DEPTH=tile.depth, GROUP=_GROUP, SYMMETRIC=symmetric, HAS_C=c is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def multiply_descriptors(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float, symmetric: bool, tile: Tile
) -> None:
    """Write ``alpha a @ b + beta c`` to ``out``, whose rows are contiguous and aligned, through the TMA unit."""
    batch, m, k = a.shape
    n = b.shape[2]
    a, a_transposed = _stored(a)
    b, b_transposed = _stored(b)
    square, piece = tile.rows, tile.rows // tile.pieces
    a_block = (tile.depth, tile.rows) if a_transposed else (tile.rows, tile.depth)
    b_block = (tile.cols, tile.depth) if b_transposed else (tile.depth, tile.cols)
    addend = out
    if c is not None:
        # A symmetric C may be read either way round.
        addend, c_transposed = _stored(c)
        if c_transposed and not symmetric:
            addend = _aligned_copy(c)
    tiles = tile.count(m, n, symmetric)
    programs = min(batch * tiles, tile.programs_per_sm * _properties(a.device)[0])
    triton_kernels.matmul_descriptors[(programs,)](
        describe(a, *a_block), describe(b, *b_block), describe(addend, square, square),
        describe(out, square, piece), describe(out, piece, square), batch, tiles, m, n, k, alpha, beta,
        ROWS=tile.rows, COLS=tile.cols, DEPTH=tile.depth, GROUP=_GROUP, PIECES=tile.pieces,
        FLATTEN=tile.flatten and not symmetric, A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed,
        SYMMETRIC=symmetric, HAS_C=c is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _stored(x: Tensor) -> tuple[Tensor, bool]:
    """Storage of ``x`` with contiguous rows, and whether it holds the transpose; a copy where no descriptor fits."""
    if _describable(x):
        return x, False
    if _describable(x.mT):
        return x.mT, True
    return _aligned_copy(x), False


def _describable(x: Tensor) -> bool:
    """Descriptors need contiguous rows, and addresses and strides that are positive multiples of 16 bytes."""
    unit = 16 // x.element_size()
    aligned = x.stride(0) % unit == 0 and x.stride(1) % unit == 0 and x.data_ptr() % 16 == 0
    return aligned and x.stride(2) == 1 and x.stride(1) > 0 and x.stride(0) > 0


def _aligned_copy(x: Tensor) -> Tensor:
    """Far cheaper than a product through pointers that cannot load more than one element at a time."""
    batch, rows, cols = x.shape
    return _empty(batch, rows, cols, x.dtype, x.device).copy_(x)


def _empty(batch: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(batch, rows, cols) storage that a descriptor fits: rows start at multiples of 16 bytes."""
    pitch = _ceil_div(cols * dtype.itemsize, 16) * 16 // dtype.itemsize
    return torch.empty(batch, rows, pitch, dtype=dtype, device=device)[..., :cols]


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True)
class _Address:
    """What a descriptor wants to know of a tensor. It does not keep the memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def describe(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Descriptor of (batch, m, n) storage, loaded and stored in blocks of (1, rows, cols)."""
    return _describe(x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), rows, cols)


@lru_cache(maxsize=4096)
def _describe(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int, cols: int
) -> TensorDescriptor:
    # To make one costs as much as half a launch. Torch's allocator hands out the same addresses in every step.
    return TensorDescriptor(_Address(address, dtype), list(shape), list(strides), [1, rows, cols])


@lru_cache(maxsize=256)
def _addresses(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """On the device, int64. Torch's allocator hands out the same ones in every step."""
    pointers = torch.tensor(addresses, dtype=torch.int64)
    # From pinned memory the copy does not wait for the device.
    return pointers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else pointers


@lru_cache
def _properties(device: torch.device) -> tuple[int, tuple[int, int]]:
    """Multiprocessors and NVIDIA's compute capability; of the CPU, where Triton's interpreter runs, one and (0, 0)."""
    if device.type != "cuda":
        return 1, (0, 0)
    properties = torch.cuda.get_device_properties(device)
    # AMD counts to 9 as well.
    capability = (0, 0) if torch.version.hip else (properties.major, properties.minor)
    return properties.multi_processor_count, capability


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
