"""The operations in Triton: one launch for a whole batch, and half the work for a symmetric product.

Import this module only where Triton is installed, ``OLDEST_TRITON`` or newer.

The result of a matrix does not depend on its batch: every tile accumulates in fp32 along all of K, upwards, and ends in
the same expression (``products``). ``choose_tile`` may therefore look at the batch without changing a bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, cycle

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ds_muon.kernels import ahead, products
from ds_muon.kernels.launch import addresses_of, ceil_div, on
from ds_muon.orthogonalize.coefficients import Triple
from ds_muon.orthogonalize.graphs import GraphCache, overlapped
from ds_muon.orthogonalize.newton_schulz import Iteration
from ds_muon.orthogonalize.tiles import Tile, choose_tile, tiles_for

# Most parts in which a matrix is normalized, and elements that a program handles at a time: few enough for its
# registers to fit beside two programs of SMALL, of the other half of the batch; with padded rows, of those without a C.
_PARTS = 1024
_BLOCK = 2048

# Rows and columns that a program of ``affine`` handles.
_AFFINE_BLOCK = 8, 128

# Of tensors that share a piece of memory, in bytes.
_ALIGNMENT = 512

# Rows of blocks that are worked on together, so that they share operands in L2. A multiple of cols / rows.
_GROUP = 8

# Sub-batches that a batch is cut into, each on a stream of its own: one fills the gaps that the other leaves
# at the end of a launch, and reads its input while that multiplies. Three or more were slower on H100, for any shape.
_PARTS_IN_PARALLEL = 2


class TritonProducts:
    """See ``newton_schulz.Operations``. Needs a GPU, but for Triton's interpreter.

    Tensors are (batch, m, n) in bf16, fp16 or fp32, with any strides: a transposed operand is read where it lies. No
    operand is modified. A product whose second operand is a transposed tensor is transposed as well, so that a tall
    matrix stays in its own storage throughout. A symmetric result equals its transpose exactly, but for what rounding
    makes of squares of 128 on its diagonal.

    Args:
        buffers: memory for (batch, m, m) results, as ``_empty`` makes it, to be overwritten in turns. None: each result
            gets its own.
        tile: for every product; by ``choose_tile`` unless given.
    """

    def __init__(self, buffers: Sequence[Tensor] | None = None, tile: Tile | None = None) -> None:
        self._buffers = cycle((None,) if buffers is None else buffers)
        self._symmetric = tile
        self._plain = tile and replace(tile, quarters=False)

    def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
        return matmul(a, b, symmetric=True, out=next(self._buffers), tile=self._symmetric)

    def polynomial(self, r: Tensor, triple: Triple) -> Tensor:
        a, b, c = triple
        out = next(self._buffers)
        if c == 0:
            return affine(r, beta=b, identity=a, out=out)
        return matmul(r, r, r, alpha=c, beta=b, identity=a, symmetric=True, out=out, tile=self._symmetric)

    def product(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        return matmul(a, b, out=out, tile=self._plain)

    def step(self, r: Tensor, triple: Triple, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.dtype != torch.float32:
            return self.product(self.polynomial(r, triple), x, out)
        # a I is not rounded into the polynomial: half the error, and every step is one of these in fp32.
        a, b, c = triple
        return self.product(self.polynomial(r, (0.0, b, c)), x, out).add_(x, alpha=a)


class TritonBackend:
    """See ``backends.Backend``. A batch is worked on in one piece of memory, which its result keeps alive.

    Args:
        tile: see ``TritonProducts``.
    """

    compact = False

    def __init__(self, tile: Tile | None = None) -> None:
        self._graphs = GraphCache()
        self._tile = tile

    def alone(self, device: torch.device, dtype: torch.dtype) -> bool:
        return False

    def workspace(self, rows: int, cols: int, dtype: torch.dtype, buffers: int) -> int:
        return _layout(1, rows, cols, dtype, buffers).nbytes

    def run(self, matrices: Sequence[Tensor], iteration: Iteration) -> Tensor:
        matrices = [matrix.contiguous() for matrix in matrices]
        device, (rows, cols) = matrices[0].device, matrices[0].shape
        addresses, aligned = addresses_of(matrices)
        layout = _layout(len(matrices), rows, cols, iteration.dtype, iteration.buffers)
        memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)

        def work(addresses: Tensor, memory: Tensor) -> None:
            _orthogonalize(addresses, layout, memory, aligned, iteration, self._tile)

        key = (iteration, device, layout, aligned)
        self._graphs.run(key, addresses, memory, work)
        return layout.result(memory)

    def release(self) -> None:
        self._graphs.clear()
        _describe.cache_clear()

    def for_trial(self, device: torch.device, dtype: torch.dtype) -> Sequence[TritonBackend]:
        return [TritonBackend(tile) for tile in tiles_for(_properties(device)[1], dtype)]


@dataclass(frozen=True)
class _Layout:
    """Of the memory that a batch is worked on in: X twice, the buffers, and partial sums, one behind the other.

    Attributes:
        batch, rows, cols, dtype: of the result.
        buffers: of the ``Iteration``.
    """

    batch: int
    rows: int
    cols: int
    dtype: torch.dtype
    buffers: int

    @cached_property
    def _pieces(self) -> list[tuple[int, torch.dtype, tuple[int, ...], int]]:
        """Start in bytes, dtype, shape in storage, and what the last dimension is without padding, of all tensors."""
        side, (parts, _) = min(self.rows, self.cols), _parts(self.rows * self.cols)
        wanted = [(self.dtype, self.rows, self.cols)] * 2 + [(self.dtype, side, side)] * self.buffers
        shapes: list[tuple[torch.dtype, tuple[int, ...], int]]
        shapes = [(dtype, (self.batch, rows, _pitch(cols, dtype)), cols) for dtype, rows, cols in wanted]
        shapes += [(torch.float64, (self.batch, parts), parts), (torch.float32, (self.batch, parts), parts)]
        shapes += [(torch.float32, (self.batch, 2), 2)]
        sizes = [ceil_div(dtype.itemsize * math.prod(shape), _ALIGNMENT) * _ALIGNMENT for dtype, shape, _ in shapes]
        return [(start, *shape) for start, shape in zip(accumulate(sizes, initial=0), shapes, strict=False)]

    @cached_property
    def nbytes(self) -> int:
        start, dtype, shape, _ = self._pieces[-1]
        return start + dtype.itemsize * math.prod(shape)

    def result(self, memory: Tensor) -> Tensor:
        """(batch, rows, cols): the first of ``tensors``."""
        return self._tensor(memory, *self._pieces[0])

    def tensors(self, memory: Tensor) -> list[Tensor]:
        """X, which becomes the result, another X, the buffers, and what ``normalize`` sums up, in its order.

        Args:
            memory: (nbytes,) uint8.
        """
        return [self._tensor(memory, *piece) for piece in self._pieces]

    @staticmethod
    def _tensor(memory: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...], width: int) -> Tensor:
        nbytes = dtype.itemsize * math.prod(shape)
        return memory[start : start + nbytes].view(dtype).view(shape)[..., :width]


@lru_cache(maxsize=1024)
def _layout(batch: int, rows: int, cols: int, dtype: torch.dtype, buffers: int) -> _Layout:
    """The same object every time, for it works out its pieces once."""
    return _Layout(batch, rows, cols, dtype, buffers)


def _orthogonalize(
    addresses: Tensor, layout: _Layout, memory: Tensor, aligned: bool, iteration: Iteration, tile: Tile | None
) -> None:
    """Normalize the matrices at ``addresses`` and iterate on them, in ``memory``; see ``backends.Backend.run``."""
    tall = layout.rows > layout.cols

    def load(addresses: Tensor, *room: Tensor) -> tuple[Tensor, TritonProducts, Tensor]:
        result, other, *rest = room
        buffers, sums = rest[: layout.buffers], rest[layout.buffers :]
        # The passes write to both in turns, and the last one to the result.
        x, other = (other, result) if len(iteration.blocks) % 2 else (result, other)
        normalize(addresses, x, iteration.eps, sums, aligned=aligned)
        return x.mT if tall else x, TritonProducts(buffers, tile), other.mT if tall else other

    def multiply(ready: tuple[Tensor, TritonProducts, Tensor]) -> None:
        iteration.run(*ready)

    parts = min(_PARTS_IN_PARALLEL, layout.batch)
    rooms = zip(*(tensor.tensor_split(parts) for tensor in (addresses, *layout.tensors(memory))), strict=True)
    overlapped([(partial(load, *room), multiply) for room in rooms], memory.device)


def _parts(numel: int) -> tuple[int, int]:
    """Parts in which a matrix is normalized, and elements of each. The order of summation depends on nothing else."""
    parts = min(_PARTS, 1 << (ceil_div(numel, _BLOCK) - 1).bit_length())
    return parts, ceil_div(numel, parts * _BLOCK) * _BLOCK


def normalize(addresses: Tensor, out: Tensor, eps: float, sums: Sequence[Tensor], *, aligned: bool = False) -> None:
    """Each fp32 matrix over its largest magnitude, then over its Frobenius norm.

    Two passes over the input, read where it lies. The norm is summed in fp64 and rounded once.

    Args:
        addresses: (batch,) int64, on the device: where the matrices lie. They are not modified.
        out: (batch, rows, cols), to be overwritten, with contiguous rows and no gaps between matrices.
        eps: guards the division by a zero norm.
        sums: memory for the squares and the largest magnitude of each part, (batch, parts) fp64 and fp32, and for both
            factors of a matrix, (batch, 2) fp32.
        aligned: all addresses are multiples of 16 bytes.
    """
    batch, rows, cols = out.shape
    squares, largest, factors = sums
    numel, pitch = rows * cols, out.stride(1)
    parts, part_size = _parts(numel)
    constants = {"BLOCK": _BLOCK, "ALIGNED": aligned, "num_warps": 4}
    eps = max(eps, torch.finfo(torch.float32).tiny)
    with on(out.device):
        products.measure[(batch * parts,)](addresses, largest, squares, numel, parts, part_size, **constants)
        products.combine[(batch,)](largest, squares, factors, eps, PARTS=parts)
        products.scale[(batch * parts,)](
            addresses, factors, out, numel, parts, part_size, rows, cols, pitch, DENSE=pitch == cols, **constants
        )


def compile_ahead(shapes: Iterable[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> None:
    """Compile side by side what normalizes matrices of these shapes: the rest does not depend on them."""

    def launch() -> None:
        for rows, cols in shapes:
            layout = _layout(1, rows, cols, dtype, 0)
            out, _, *sums = layout.tensors(torch.empty(layout.nbytes, dtype=torch.uint8, device="meta"))
            normalize(torch.empty(1, dtype=torch.int64, device="meta"), out, 0.0, sums, aligned=True)

    with on(device):
        ahead.compile_ahead(products, launch)


def affine(r: Tensor, *, beta: float, identity: float, out: Tensor | None = None) -> Tensor:
    """``beta r + identity I`` in one launch, in fp32 and rounded once; allocates nothing but the result.

    Args:
        r: (batch, m, m).
        out: the same shape, to be overwritten, with contiguous rows.
    """
    batch, m, _ = r.shape
    out = _empty(batch, m, m, r.dtype, r.device) if out is None else out
    rows, cols = _AFFINE_BLOCK
    tiles = ceil_div(m, rows) * ceil_div(m, cols)
    if out.numel() > 0:
        with on(r.device):
            products.affine[(batch * tiles,)](
                r, out, tiles, m, beta, identity, *r.stride(), *out.stride()[:2], ROWS=rows, COLS=cols,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return out


def matmul(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    identity: float = 0.0,
    symmetric: bool = False,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """``a @ b``, or, symmetric, ``alpha a @ b + beta c + identity I``; see ``TritonProducts``.

    Args:
        a, b: (batch, m, k) and (batch, k, n), one dtype and device.
        c: (batch, m, n), symmetric. Without it, ``alpha``, ``beta`` and ``identity`` count for nothing.
        symmetric: the result is known to be symmetric.
        out: (batch, m, n) to be overwritten, as ``_empty`` makes it, or its transpose.
        tile: by ``choose_tile`` unless given.
    """
    assert c is None or symmetric
    batch, m, k = a.shape
    n = b.shape[2]
    if tile is None:
        sms, capability = _properties(a.device)
        tile = choose_tile(batch, m, n, k, symmetric=symmetric, sms=sms, capability=capability, dtype=a.dtype)
    if out is None:
        turned = not symmetric and _transposed(b)
        out = _empty(batch, n, m, a.dtype, a.device).mT if turned else _empty(batch, m, n, a.dtype, a.device)
    if not symmetric and _transposed(out):
        # The transpose of the result has contiguous rows.
        matmul(b.mT, a.mT, out=out.mT, tile=tile)
    elif out.numel() > 0:
        multiply = multiply_descriptors if tile.descriptors else multiply_pointers
        with on(a.device):
            multiply(a, b, c, out, (alpha, beta, identity), symmetric, tile)
    return out


def _transposed(x: Tensor) -> bool:
    return x.stride(2) != 1 and x.stride(1) == 1


_Scalars = tuple[float, float, float]


def multiply_pointers(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, scalars: _Scalars, symmetric: bool, tile: Tile
) -> None:
    """Write the product to ``out``, whose rows are contiguous, through pointers. ``scalars``: alpha, beta, identity."""
    batch, m, k = a.shape
    n = b.shape[2]
    tiles = tile.count(m, n, symmetric)
    addend = out if c is None else c if c.stride(2) == 1 else c.contiguous()
    products.matmul_pointers[(batch * tiles,)](
        a, b, addend, out, tiles, m, n, k, *scalars,
        *a.stride(), *b.stride(), *addend.stride()[:2], *out.stride()[:2],
        ROWS=tile.rows, COLS=tile.cols, DEPTH=tile.depth, GROUP=_GROUP, SYMMETRIC=symmetric, HAS_C=c is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def multiply_descriptors(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, scalars: _Scalars, symmetric: bool, tile: Tile
) -> None:
    """Write the product to ``out``, whose rows are contiguous and aligned, through the TMA unit."""
    batch, m, k = a.shape
    n = b.shape[2]
    a, a_transposed = _stored(a)
    b, b_transposed = _stored(b)
    # A symmetric C may be read either way round.
    c, _ = (out, False) if c is None else _stored(c)
    square, piece = tile.rows, tile.rows // tile.pieces

    def operands(rows: int, cols: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        of_a = describe(a, *((tile.depth, rows) if a_transposed else (rows, tile.depth)))
        return of_a, describe(b, *((cols, tile.depth) if b_transposed else (tile.depth, cols)))

    stores = describe(out, square, piece), describe(out, piece, square)
    tiles, sms = tile.count(m, n, symmetric), _properties(a.device)[0]
    constants = {
        "DEPTH": tile.depth, "GROUP": _GROUP, "PIECES": tile.pieces, "HAS_C": c is not out,
        "A_TRANSPOSED": a_transposed, "B_TRANSPOSED": b_transposed, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    if tile.quarters:
        half, whole = square // 2, min(batch * tiles, sms)
        products.matmul_quarters[(whole + 4 * (batch * tiles - whole),)](
            *operands(square, square), describe(c, square, square), *stores,
            *operands(half, half), describe(c, half, half), describe(out, half, half),
            whole, tiles, m, k, *scalars, SIDE=square, **constants,
        )  # fmt: skip
    else:
        products.matmul_descriptors[(min(batch * tiles, tile.programs_per_sm * sms),)](
            *operands(square, tile.cols), describe(c, square, square), *stores, batch, tiles, m, n, k, *scalars,
            ROWS=tile.rows, COLS=tile.cols, FLATTEN=tile.flatten, SYMMETRIC=symmetric, **constants,
        )  # fmt: skip


def _stored(x: Tensor) -> tuple[Tensor, bool]:
    """Storage of ``x`` with contiguous rows, and whether it holds the transpose; a copy where no descriptor fits."""
    if _describable(x):
        return x, False
    if _describable(x.mT):
        return x.mT, True
    # Far cheaper than a product through pointers that cannot load more than one element at a time.
    batch, rows, cols = x.shape
    return _empty(batch, rows, cols, x.dtype, x.device).copy_(x), False


def _describable(x: Tensor) -> bool:
    """Descriptors need contiguous rows, and addresses and strides that are positive multiples of 16 bytes."""
    unit = 16 // x.element_size()
    aligned = x.stride(0) % unit == 0 and x.stride(1) % unit == 0 and x.data_ptr() % 16 == 0
    return aligned and x.stride(2) == 1 and x.stride(1) > 0 and x.stride(0) > 0


def _empty(batch: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(batch, rows, cols) storage that a descriptor fits: rows start at multiples of 16 bytes."""
    return torch.empty(batch, rows, _pitch(cols, dtype), dtype=dtype, device=device)[..., :cols]


def _pitch(cols: int, dtype: torch.dtype) -> int:
    return ceil_div(cols * dtype.itemsize, 16) * 16 // dtype.itemsize


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


@lru_cache
def _properties(device: torch.device) -> tuple[int, tuple[int, int]]:
    """Multiprocessors and NVIDIA's compute capability; of the CPU, where Triton's interpreter runs, one and (0, 0)."""
    if device.type != "cuda":
        return 1, (0, 0)
    properties = torch.cuda.get_device_properties(device)
    # AMD counts to 9 as well.
    capability = (0, 0) if torch.version.hip else (properties.major, properties.minor)
    return properties.multi_processor_count, capability
